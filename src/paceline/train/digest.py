"""A fingerprint of a model's weights: equal exactly when every bit of every tensor is."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over name, dtype, shape and bytes of every entry of the state_dict, in order of name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()
