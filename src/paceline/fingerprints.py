"""Tensors, samples and optimizers as a few numbers each, which workers and runs can compare.

A tensor's fingerprint is its norm and its inner products with a few fixed vectors of random signs s. Since
E[(s.a - s.b)^2] = |a - b|^2, two fingerprints give the distance of two tensors without keeping either (Achlioptas,
"Database-friendly random projections", 2003).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

NUM_PROJECTIONS = 8


def fingerprints(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[float]]:
    """The fingerprint of each tensor, in float64."""
    return {name: _fingerprint(tensor.detach().to("cpu", torch.float64).reshape(-1)) for name, tensor in tensors}


def _fingerprint(flat: Tensor) -> list[float]:
    signs = torch.Generator().manual_seed(flat.numel())
    values = [float(flat.norm())]
    for _ in range(NUM_PROJECTIONS):
        bits = torch.randint(0, 2, flat.shape, generator=signs, dtype=torch.int8)
        values.append(float(flat @ (2 * bits - 1).to(torch.float64)))
    return values


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The numbers of every parameter group."""
    return [
        {
            name: [float(one) for one in value] if isinstance(value, tuple | list) else float(value)
            for name, value in group.items()
            if isinstance(value, bool | int | float | tuple) or (isinstance(value, Tensor) and value.numel() == 1)
        }
        for group in optimizer.param_groups
    ]


def sample_digests(leaves: Iterable[Tensor]) -> Iterator[int]:
    """A number for each row of the tensors of a batch that have as many rows as the first one."""
    found = [leaf.detach().cpu() for leaf in leaves if leaf.dim() > 0]
    for row in zip(*(leaf for leaf in found if len(leaf) == len(found[0])), strict=True):
        crc = 0
        for leaf in row:
            crc = zlib.crc32(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
        yield crc
