"""The random number generators of Python, NumPy and torch: they are seeded for each virtual shard and for each block of
a model, and equal states show that nothing was drawn in between."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed all generators. Not by torch.manual_seed, which keeps a call and its stack trace for an unused CUDA."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def generator_states(device: torch.device) -> tuple[bytes, ...]:
    """The states of all generators that `seed_generators` seeds: equal where nothing was drawn in between."""
    return (*host_states(), *torch_states(device))


def torch_states(device: torch.device) -> list[bytes]:
    """The states of torch's own generators, of the host and of a GPU."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [state.numpy().tobytes() for state in states]


def host_states() -> tuple[bytes, bytes]:
    """The states of NumPy's and Python's generators."""
    return pickle.dumps(np.random.get_state(legacy=False)), pickle.dumps(random.getstate())


class BlockSeeds:
    """Seeds torch's generators, of the host and of a device, whenever a block begins its forward pass.

    It does so from `begin_shard` to `end` only, backward passes included: they may compute blocks again. What
    torch.compile compiles draws as it would without.
    """

    def __init__(self, device: torch.device, blocks: Mapping[str, nn.Module]) -> None:
        """
        Args:
            blocks: by path in the whole model.
        """
        self._on_gpu = device.type == "cuda"
        self._state: int | None = None
        """What a shard's seed adds to those of its blocks; None: blocks draw from the generators as they are."""
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

    def seed_block(self, path: str) -> None:
        """Seed the generators for a block of another worker, which is passed over here."""
        self._hook(path)()

    def _hook(self, path: str) -> Callable[..., None]:
        number = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest())
        own = (number + 1) * _GOLDEN

        def seed_block(*_given: Any) -> None:
            if not torch.compiler.is_compiling() and self._state is not None:  # else each seed would be compiled in
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
