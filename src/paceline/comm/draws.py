"""Randomness that all workers share: a generator is a function of its key alone, never of who draws or when."""

from __future__ import annotations

import hashlib

import torch


def generator_for(*key: int | str) -> torch.Generator:
    """A fresh generator on the CPU, so that workers draw the same numbers whatever device they compute on."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
