"""The blocks of a model, and the random numbers that each draws.

A block is an element of a list of layers, or a layer outside of such lists. A pipeline may cut before any of them, and
each draws random numbers by its own name: (seed, step, virtual shard, path of the block). So where a model is cut,
whether a block is computed again in backward, and how a block is divided does not change what is drawn.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from paceline.errors import ModelError


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks by path, in the order of `named_modules`; a pure function of the model.

    They are the elements of its outermost `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict`, and outside of these
    the layers: modules without children, and those that torch itself has.
    """
    found: dict[nn.Module, str] = {}
    for path, block, _ in _blocks(model, "", is_element=isinstance(model, nn.Sequential)):
        found.setdefault(block, path)
    return {path: block for block, path in found.items()}


def elements_of_lists(model: nn.Module) -> list[nn.Module]:
    """The blocks with parameters that stand in a list of layers: they are computed one by one."""
    every = _blocks(model, "", is_element=isinstance(model, nn.Sequential))
    found = dict.fromkeys(block for _, block, is_element in every if is_element)
    return [block for block in found if any(True for _ in block.parameters())]


def _blocks(parent: nn.Module, prefix: str, *, is_element: bool) -> Iterator[tuple[str, nn.Module, bool]]:
    for name, child in parent.named_children():
        path = prefix + name
        if not can_be_called(child) or (isinstance(child, nn.Sequential) and not is_element):
            yield from _blocks(child, f"{path}.", is_element=True)
        elif is_element or _is_layer(child):
            yield path, child, is_element
        else:
            yield from _blocks(child, f"{path}.", is_element=False)


def can_be_called(module: nn.Module) -> bool:
    """Whether a module has a forward method; lists of modules have none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _is_layer(module: nn.Module) -> bool:
    parts = list(module.modules())[1:]
    is_of_torch = any(one.__module__.startswith("torch.nn.") for one in type(module).__mro__ if one is not nn.Module)
    has_lists = any(isinstance(one, nn.Sequential | nn.ModuleList | nn.ModuleDict) for one in parts)
    return not parts or is_parametrized(module) or (is_of_torch and not has_lists)


def copy_of_modules(model: nn.Module, replaced: Mapping[int, Any]) -> nn.Module:
    """A copy of a model in which what has these ids is replaced. Raises `ModelError` where torch cannot copy it."""
    originals = set(model.modules())
    try:
        copied = copy.deepcopy(model, dict(replaced))
    except RuntimeError as problem:  # torch copies no tensors that autograd has made
        raise ModelError(
            "The model cannot be cut or copied: it holds a tensor that was computed, as the weight that "
            "torch.nn.utils.weight_norm or prune makes; use torch.nn.utils.parametrizations, or the strategy dp."
        ) from problem
    for module in set(copied.modules()) - originals:
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):  # of transformers: to generate text, not to train
            config.use_cache = False
    return copied
