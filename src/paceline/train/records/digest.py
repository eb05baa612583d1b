"""Fingerprints of a model's weights: one that is equal exactly when every bit is, and one that takes less time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch


def weights_sha256(state: Mapping[str, Any]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor of a model's state_dict, in order of name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()


def checksums(state: Mapping[Any, Any]) -> list[float]:
    """Numbers that move with the values in a model's state_dict, by passes over its tensors that make no copies."""
    found = [_checksum(tensor) for tensor in state.values() if isinstance(tensor, torch.Tensor) and tensor.numel()]
    return torch.stack(found).nan_to_num().tolist() if found else []


def are_close(some: list[float], others: list[float]) -> bool:
    """Whether these may be `checksums` of the same values, computed on devices that round otherwise."""
    return len(some) == len(others) and all(
        math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-30) for one, other in zip(some, others, strict=True)
    )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    numbers = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if not numbers.is_floating_point() or numbers.dtype.itemsize == 1:  # float8 has no arithmetic
        numbers = numbers.double()
    largest, total = (torch.linalg.vector_norm(numbers, order, dtype=torch.float64) for order in (2, 1))
    found: torch.Tensor = largest + total + numbers.sum(dtype=torch.float64) / 2
    return found
