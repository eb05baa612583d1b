"""Buckets and sums for compressors that work alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.comm.compressor import RESIDUAL, Bucket, Compressor


def bucket_of(gradients: Mapping[str, Tensor]) -> Bucket:
    """A bucket as DistributedDataParallel makes it: copies in one flat vector, seen in each gradient's own layout."""
    values = torch.cat([g.new_empty(g.numel()) for g in gradients.values()])
    parts, start = [], 0
    for name, gradient in gradients.items():
        part = values.as_strided(gradient.shape, gradient.stride(), start)
        part.copy_(gradient)
        parts.append((name, part))
        start += gradient.numel()
    return Bucket(values, tuple(parts))


def alone(vector: Tensor) -> None:
    """The sum over one worker."""


def sent(compressor: Compressor, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a worker alone makes of these gradients, given to it as one bucket."""
    bucket = bucket_of(gradients)
    compressor.aggregate(bucket, alone)
    return dict(bucket.parts)


def residual(compressor: Compressor, name: str) -> Tensor | float:
    return compressor.state_dict().get(RESIDUAL + name, 0.0)


def snapshot(compressor: Compressor) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in compressor.state_dict().items()}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
