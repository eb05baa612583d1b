"""A fingerprint of a model's weights: equal exactly when every bit of every tensor is."""

from __future__ import annotations

import hashlib
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
