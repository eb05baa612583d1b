"""Sees to it that a loss function leaves the parameters of a model, and their gradients, as they are.

How often it is called in a step depends on the number of workers. A forward pass that moves a momentum encoder would
move it that often, and each worker's copy by what its own samples say; a backward pass inside of the loss function
would add to the gradients of the shards before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.errors import ModelError


class ParameterWatch:
    """Watches the calls of loss functions for changes of a model's parameters and of their gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.named_parameters())
        self._has_compared_values = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A context for one call of a loss function.

        Raises:
            ModelError: it changed a parameter, or computed gradients of parameters.
        """
        before = [_places(parameter) for _, parameter in self._parameters]
        # `.data` lets a model write without autograd's notice, so the first time values themselves are compared.
        norms = [] if self._has_compared_values else self._norms()
        yield
        for (name, parameter), (own, gradient) in zip(self._parameters, before, strict=True):
            own_now, gradient_now = _places(parameter)
            if own_now != own:
                raise _is_changed(name)
            if gradient_now != gradient:
                raise ModelError(
                    f"The loss function changed the gradient of the parameter '{name}' itself, by a backward() or "
                    "zero_grad() of its own; compute gradients in it by torch.autograd.grad(value, inputs), which "
                    "leaves those of parameters alone."
                )
        if norms:
            self._has_compared_values = True
            for (name, _), norm, norm_now in zip(self._parameters, norms, self._norms(), strict=True):
                if norm_now != norm and norm == norm:
                    raise _is_changed(name)

    @torch.no_grad()
    def _norms(self) -> list[float]:
        """The norm of every parameter, which tells whether values have changed."""
        own = [_local(parameter) for _, parameter in self._parameters]
        return [float(one.norm()) if one.is_floating_point() or one.is_complex() else 0.0 for one in own]


def _places(parameter: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of a parameter and of its gradient: where it lies in memory and how often it was changed."""
    own, gradient = _local(parameter), parameter.grad
    version = 0 if own.is_inference() else own._version
    return (own.data_ptr(), version), (0, 0) if gradient is None else (id(gradient), _local(gradient)._version)


def _local(tensor: Tensor) -> Tensor:
    """The tensor that counts changes: of a sharded one this worker's part. In every pass, so without a new view."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _is_changed(name: str) -> ModelError:
    return ModelError(
        f"A forward pass changed the parameter '{name}', and how many passes a step takes depends on the number of "
        "workers; change it after run.step, or hold what forward passes change in a buffer (register_buffer)."
    )
