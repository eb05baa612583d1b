"""What a program does in the backward pass that the value of its loss does not show.

Code that is not torch's, an `autograd.Function` or a hook on a tensor or a module, may compute over all samples of a
pass, as one that divides a gradient by its norm does. And what a loss takes as a constant may be computed from all of
them, as in `loss / loss.detach()`, which is 1 whatever the samples are. Where there is either, gradients are compared:
those of virtual shards together and one by one. Workers that hold parts of a model cannot compute a gradient for a
comparison alone: there, only hooks on modules are noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from paceline.parallel.kept.kept_values import package_of
from paceline.parallel.losses import ShardLoss
from paceline.parallel.random_numbers.torch_calls import FunctionCalls, calling_module

MAY_COUPLE_GRADIENTS = (
    "The program has code of its own in the backward pass (an autograd.Function, or a hook on a tensor or a module), "
    "which may compute over all samples of a pass, so every virtual shard goes through the model alone, which gives "
    "the same result on any number of workers."
)
COUPLES_GRADIENTS = (
    "The gradient of several virtual shards together is not the sum of their own, as their loss is: code of the "
    "program's own in the backward pass (an autograd.Function, or a hook on a tensor or a module) computes over all "
    "samples of a pass. So every shard goes through the model alone, which gives the same result on any number of "
    "workers; shard_by_shard = true says so."
)
COUPLES_CONSTANTS = (
    "The gradient of several virtual shards together is not the sum of their own, as their loss is: a value that the "
    "loss takes as a constant (detach(), torch.no_grad()) is computed over all samples of a pass. So every shard goes "
    "through the model alone, which gives the same result on any number of workers; shard_by_shard = true says so."
)

_READS = (Tensor.item, Tensor.tolist, Tensor.__float__)


class BackwardCode(FunctionCalls):
    """A context for one call of a loss function, with gradients, in which it is noticed whether there is such code."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._call_function)
        self.is_found = any(one._backward_hooks or one._backward_pre_hooks for one in model.modules())
        self.has_constants = False
        """Whether the program takes floating-point numbers that depend on the model for constants."""

    def _call_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is Tensor.register_hook:
            self._note([*args[1:], *kwargs.values()][0])
        depends_on_model = any(isinstance(one, Tensor) and one.requires_grad for one in args)
        result = function(*args, **kwargs)
        if depends_on_model and not self.has_constants:
            is_constant = function in _READS or any(
                map(_is_constant, result if isinstance(result, tuple) else [result])
            )
            # Batch norm layers note statistics, and weights are watched.
            self.has_constants = is_constant and not calling_module("torch.").startswith("paceline.")
        return result

    def _note(self, code: object) -> None:
        self.is_found |= package_of(code) not in ("torch", "paceline")

    def look_at(self, loss: ShardLoss) -> None:
        """Look through the graph of what the call returned."""
        for kind in _kinds(loss.mean):
            if issubclass(kind, BackwardCFunction):
                self._note(kind._forward_cls)


def describe_gradients(code: BackwardCode, is_coupled: bool | None) -> str:
    """A sentence if shards have to go one by one.

    Args:
        is_coupled: whether the gradient of several together is not the sum of their own; None: it is not known.
    """
    if is_coupled:
        return COUPLES_GRADIENTS if code.is_found else COUPLES_CONSTANTS
    return MAY_COUPLE_GRADIENTS if code.is_found and is_coupled is None else ""


@dataclass(frozen=True)
class Gradient:
    """The gradient of a loss times its weight, as far as it is compared."""

    products: Tensor
    """[num_parameters], float64: of each parameter's gradient with random numbers that are the same in every call."""
    squared_norm: float

    @classmethod
    def of(cls, loss: ShardLoss, parameters: Sequence[Tensor]) -> Gradient:
        """The gradient of trained parameters, which have no graph."""
        draws, products, squared_norm = torch.Generator().manual_seed(0), [], 0.0
        gradients: Sequence[Tensor | None] = torch.autograd.grad(loss.weighted, parameters, allow_unused=True)
        for gradient in gradients:
            if gradient is None:
                products.append(0.0)
                continue
            values = (gradient.to_dense() if gradient.is_sparse else gradient).detach().double()
            factors = torch.randn(values.shape, generator=draws, dtype=torch.float64)
            products.append(float((values * factors.to(values.device)).sum()))
            squared_norm += float(values.square().sum())
        return cls(torch.tensor(products, dtype=torch.float64), squared_norm)


def are_coupled(together: Gradient, alone: Sequence[Gradient], tolerance: float) -> bool:
    """Whether a gradient is not the sum of others.

    Args:
        tolerance: the relative difference of two losses that is put down to rounding; of gradients its square root is.
    """
    difference = torch.stack([one.products for one in alone]).sum(0) - together.products
    largest = max(one.squared_norm for one in (together, *alone)) ** 0.5
    return bool(difference.norm() > tolerance**0.5 * largest)  # not of what is no number


def _is_constant(result: object) -> bool:
    return isinstance(result, Tensor) and result.is_floating_point() and not result.requires_grad


def _kinds(loss: Tensor) -> set[Any]:
    """The classes of all operations that a loss was computed by."""
    left: list[Any] = [loss.grad_fn]
    seen = set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return {type(node) for node in seen}
