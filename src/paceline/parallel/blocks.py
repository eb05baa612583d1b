"""The blocks of a model, and the random numbers that each draws.

A block is an element of a list of layers, or a layer outside of such lists. A pipeline may cut before any of them, and
each draws random numbers by its own name: (seed, step, virtual shard, path of the block). So where a model is cut,
whether a block is computed again in backward, and how a block is divided does not change what is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks by path, in the order of `named_modules`; a pure function of the model.

    They are the elements of its outermost `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict`, and outside of these
    the layers: modules without children, and those that torch itself has.
    """
    found: dict[nn.Module, str] = {}
    for path, block in _blocks(model, "", is_element=isinstance(model, nn.Sequential)):
        found.setdefault(block, path)
    return {path: block for block, path in found.items()}


def _blocks(parent: nn.Module, prefix: str, *, is_element: bool) -> Iterator[tuple[str, nn.Module]]:
    for name, child in parent.named_children():
        path = prefix + name
        if not can_be_called(child) or (isinstance(child, nn.Sequential) and not is_element):
            yield from _blocks(child, f"{path}.", is_element=True)
        elif is_element or _is_layer(child):
            yield path, child
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


def uncompiled_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks but for those inside of what torch.compile compiles as a whole."""
    compiled = [
        f"{path}." if path else ""
        for path, one in model.named_modules()
        if "_compiled_call_impl" in vars(one) or "_orig_mod" in one._modules
    ]
    blocks = blocks_of(model).items()
    return {path: block for path, block in blocks if not any(f"{path}.".startswith(one) for one in compiled)}


class BlockSeeds:
    """Seeds torch's generators, of the host and of a device, whenever a block begins its forward pass.

    It does so from `begin_shard` to `end` only, backward passes included: they may compute blocks again.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._state: int | None = None
        """What a shard's seed adds to those of its blocks; None: blocks draw from the generators as they are."""

    def watch(self, blocks: Mapping[str, nn.Module]) -> None:
        """Put a hook on each block.

        Args:
            blocks: by path in the whole model.
        """
        for path, block in blocks.items():
            block.register_forward_pre_hook(self._hook(path))

    def begin_shard(self, seed: int) -> None:
        """
        Args:
            seed: of the virtual shard whose forward or backward pass begins.
        """
        self._state = _mixed((seed + _GOLDEN) & _MASK)

    def end(self) -> None:
        """Leave the generators alone from now on."""
        self._state = None

    def _hook(self, path: str) -> Callable[..., None]:
        number = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest())
        own = (number + 1) * _GOLDEN

        def seed_block(*_given: Any) -> None:
            if self._state is not None:
                seed = _mixed((self._state + own) & _MASK) >> 1
                torch.default_generator.manual_seed(seed)
                if self._on_gpu:
                    torch.cuda.manual_seed(seed)

        return seed_block


def _mixed(bits: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    bits = ((bits ^ (bits >> 30)) * _MIX_1) & _MASK
    bits = ((bits ^ (bits >> 27)) * _MIX_2) & _MASK
    return bits ^ (bits >> 31)
