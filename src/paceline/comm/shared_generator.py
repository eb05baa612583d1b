"""Random generators that are equal on all workers: each is a function of its key alone."""

from __future__ import annotations

import hashlib

import torch


def shared_generator(*key: int | str) -> torch.Generator:
    """A fresh generator on the CPU, so that workers on different devices draw the same numbers."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
