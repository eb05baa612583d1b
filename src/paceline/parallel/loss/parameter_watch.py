"""Checks that a loss function does not change a model's parameters or their gradients.

How often it is called in a step depends on the number of workers. A forward pass that moves a momentum encoder would
move it that often, and each worker's copy by what its own samples say; a backward pass inside of the loss function
would add to the gradients of the shards before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.containers import versions
from paceline.dtensor_type import is_dtensor
from paceline.errors import ModelError
from paceline.parallel.loss.gradient_hooks import changes_parts, is_linear


class ParameterWatch:
    """Watches the calls of loss functions for changes of a model's parameters and of their gradients."""

    def __init__(self, model: nn.Module, *, shards_are_alone: bool) -> None:
        # Quantized ones are of classes of their own, some of which lie in several places.
        named = [(name, one) for name, one in model.named_parameters() if type(_local(one)) in (Tensor, nn.Parameter)]
        self._names = [name for name, _ in named]
        self._parameters: list[Tensor] = [parameter for _, parameter in named]
        self._are_whole = all(_local(one) is one for one in self._parameters)
        self._places = [
            (module._parameters, name, f"{path}.{name}" if path else name, parameter)
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            # FSDP puts whole parameters in the place of shards.
            if parameter is not None and _local(parameter) is parameter
        ]
        self._storages = [(name, one, one.untyped_storage()) for name, one in named if is_dtensor(one)]
        """The empty storages of sharded parameters: `.data = …` replaces them, and leaves the shards."""
        self._shards_are_alone = shards_are_alone
        self._known_hooks = [hook for hook, *_ in self._hooks()]
        """The hooks that `run.prepare` has checked, and those found to be harmless since."""

    @contextmanager
    def __call__(self, *, is_examination: bool, step: int) -> Iterator[None]:
        """A context for one call of a loss function.

        Args:
            is_examination: whether it is called to see what it does.
            step: the number of the training step.

        Raises:
            ModelError: it changed a parameter, or computed gradients of parameters.
        """
        if name := self._first_replaced():
            raise ModelError(
                f"The script has replaced or removed the parameter '{name}' since run.prepare, and nothing would train "
                "what takes its place; do so before run.prepare (prune.identity prunes nothing yet), and change values "
                "in place."
            )
        for name, sharded, storage in self._storages:
            if sharded.untyped_storage()._cdata != storage._cdata:
                raise ModelError(
                    f"The script has assigned to '.data' of the parameter '{name}', which is sharded: torch does not "
                    "change its values by that; change them in place, as by copy_, mul_ or lerp_."
                )
        held = self._held()
        before, places, gradients = versions(held), [one.data_ptr() for one in held], self._gradients()
        # `.data` lets a model write without autograd's notice, so in the steps 1, 2, 4, 8, … values themselves are
        # compared. In the first step an average of weights that began as a copy of them stays what it was.
        is_close = is_examination or step.bit_count() == 1
        norms = _norms(held) if is_close else []
        if is_close:
            self._check_new_hooks()
        yield
        if name := self._first_replaced():
            raise _is_changed(name)
        held = self._held()
        if name := self._first_that_differs(before, versions(held)):
            raise _is_changed(name)
        if name := self._first_that_differs(gradients, self._gradients()):
            if not self._are_whole:
                raise ModelError(
                    f"The loss function computes gradients itself, and the parameter '{name}', which is sharded, has "
                    "got one by that; a loss function that does so needs the strategy dp."
                )
            raise ModelError(
                f"The loss function changed the gradient of the parameter '{name}' itself, by a backward() or "
                "zero_grad() of its own; compute gradients in it by torch.autograd.grad(value, inputs), which leaves "
                "those of parameters alone."
            )
        if norms and (name := self._first_that_differs(norms, _norms(held))):
            raise _is_changed(name)
        for name, one, place in zip(self._names, held, places, strict=True):
            if one.data_ptr() != place and not _lies_among_others(one):
                raise _is_changed(name)

    def _hooks(self) -> list[tuple[Callable[[Tensor], Tensor | None], str, Tensor]]:
        """The hooks on gradients of parameters, each with the parameter's name and the parameter."""
        named = zip(self._names, self._parameters, strict=True)
        return [(hook, name, one) for name, one in named for hook in (one._backward_hooks or {}).values()]

    def _check_new_hooks(self) -> None:
        """Raises `ModelError` for hooks of the script that act otherwise on another number of workers."""
        for hook, name, parameter in self._hooks():
            if self._shards_are_alone or any(hook is one for one in self._known_hooks):
                continue
            if not self._are_whole or not is_linear(hook, parameter):
                raise ModelError(changes_parts(name))
            self._known_hooks.append(hook)

    # In every pass, so with few calls for each parameter.

    def _first_replaced(self) -> str:
        """The name of the first parameter in whose place its module has something else; empty where there is none."""
        places = self._places
        return next((whole_name for holder, name, whole_name, one in places if holder.get(name) is not one), "")

    def _gradients(self) -> list[tuple[int, int] | None]:
        """Which tensor every gradient is, and how often it was changed."""
        gradients = [parameter.grad for parameter in self._parameters]
        return [None if one is None else (id(one), _local(one)._version) for one in gradients]

    def _held(self) -> list[Tensor]:
        """Every parameter, or this worker's shard of it."""
        return self._parameters if self._are_whole else [_local(one) for one in self._parameters]

    def _first_that_differs(self, before: Sequence[object], now: Sequence[object]) -> str:
        """The name of the first parameter of which something has changed; empty where nothing has."""
        if before == now:
            return ""
        return next(name for name, one, other in zip(self._names, before, now, strict=True) if one != other)


@torch.no_grad()
def _norms(held: Sequence[Tensor]) -> list[str]:
    """The norm of each, which tells whether values have changed; NaN is equal to itself. Waits for the device once."""
    have_norms = [one.dtype.itemsize > 1 and (one.is_floating_point() or one.is_complex()) for one in held]
    norms = [one.norm().double() for one, has_norm in zip(held, have_norms, strict=True) if has_norm]
    found = iter(torch.stack(norms).tolist() if norms else ())
    return [str(next(found)) if has_norm else "" for has_norm in have_norms]


def _local(tensor: Tensor) -> Tensor:
    """The tensor that counts changes: of a sharded one this worker's part, without a new view."""
    is_plain = type(tensor) is nn.Parameter or type(tensor) is Tensor
    return tensor if is_plain else getattr(tensor, "_local_tensor", tensor)


def _lies_among_others(tensor: Tensor) -> bool:
    """Whether it is a part of some memory, as the weights of a recurrent layer are after `flatten_parameters()`, which
    puts them there with their values. What `parameter.data = ...` assigns has its own."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def _is_changed(name: str) -> ModelError:
    return ModelError(
        f"A forward pass changed the parameter '{name}', and how many passes a step takes depends on the number of "
        "workers; change it after run.step, or hold what forward passes change in a buffer (register_buffer)."
    )
