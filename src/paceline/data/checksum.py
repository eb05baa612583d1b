"""A checksum of samples, the same in every process."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.containers import open_container


def checksum(values: Iterable[Any], before: int = 0) -> int:
    """A checksum of what samples hold, continued from that of those before them; of types that are not known here only
    the names count."""
    crc = before
    for value in values:
        container = open_container(value)
        if container is not None:
            crc = checksum(container.values, zlib.crc32(repr(container.places).encode(), crc))
        elif isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
            crc = zlib.crc32(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(), crc)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            crc = zlib.crc32(np.ascontiguousarray(value).tobytes(), crc)
        elif isinstance(value, bytes):
            crc = zlib.crc32(value, crc)
        elif isinstance(value, str | int | float | np.generic | None):
            crc = zlib.crc32(repr(value).encode(), crc)
        else:
            crc = zlib.crc32(type(value).__name__.encode(), crc)
    return crc
