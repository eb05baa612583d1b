"""The activations of a model that the workers of a tensor group divide among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils import _pytree as pytree

from paceline.parallel.tensor.plan import Entry, TensorPlan

_OPENING = frozenset({"colwise", "packed_colwise", "channels", "attention"})
"""Styles whose outputs each worker has a part of."""
_CLOSING = frozenset({"rowwise", "gather_channels", "attention"})
"""Styles whose inputs each worker has a part of, and whose outputs are whole."""


@contextmanager
def counting_divided(model: nn.Module, plan: TensorPlan) -> Iterator[Callable[[], int]]:
    """Count the bytes that forward passes inside of the `with` keep for backward and that `plan` divides.

    Divided is what is kept from a layer whose output is divided up to one whose output is whole again, but for the
    input of the first; the model itself is whole.
    """
    is_open = False
    whole: set[int] = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    divided: dict[int, UntypedStorage] = {}

    def enter(_module: nn.Module, arguments: Any) -> None:
        nonlocal is_open
        is_open = True
        whole.update(
            leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)
        )

    def leave(_module: nn.Module, _arguments: Any, _output: Any) -> None:
        nonlocal is_open
        is_open = False

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if is_open and storage._cdata not in whole:
            divided[storage._cdata] = storage  # alive, or another one might get its address
        return tensor

    with ExitStack() as hooks:
        for name, entry in plan.entries.items():
            module = model.get_submodule(name)
            if _opens(entry):
                hooks.callback(module.register_forward_pre_hook(enter).remove)
            if entry.keys() & _CLOSING:
                hooks.callback(module.register_forward_hook(leave).remove)
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        yield lambda: sum(storage.nbytes() for storage in divided.values())


def _opens(entry: Entry) -> bool:
    """Whether each worker has a part of what a layer with this entry returns."""
    return bool(entry.keys() & _OPENING) and "gather_output" not in entry


def begin_divided(plan: TensorPlan, groups: Sequence[Sequence[str]]) -> list[bool]:
    """Whether each worker has a part of what a group of layers is given.

    Args:
        groups: the names of modules of each group, in the order in which they run.
    """
    is_open = False
    found = []
    for names in groups:
        found.append(is_open)
        for layer, entry in plan.entries.items():
            if any(layer == name or layer.startswith(f"{name}.") for name in names):
                is_open = (is_open or _opens(entry)) and not entry.keys() & _CLOSING
    return found
