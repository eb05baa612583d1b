"""Images made of numbers alone, which a net can learn: for measuring, or trying a model without data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.data import random_streams
from paceline.data.arrays import ArraySet
from paceline.data.counter_random import hash_keys
from paceline.data.sources import read_options
from paceline.errors import JobError
from paceline.spec import DataSpec
from paceline.spec.codec import at_least

_PATTERNS, _NOISE = 0, 1
_CELL = 4
"""Pixels a side of the patches that a class's pattern is made of: large enough for a pooling net to see."""
_CHUNK_WORDS = 1 << 20


@dataclass(frozen=True)
class SyntheticOptions:
    num_samples: int = at_least(1, 1024)
    """For training; a fifth as many more are for testing."""
    shape: tuple[int, int, int] = (3, 32, 32)
    """Channels, height, width."""
    num_classes: int = at_least(1, 10)


def load_synthetic(spec: DataSpec) -> tuple[ArraySet, ArraySet]:
    """Each image is the mean of its class's pattern and of noise of its own. Equal options give equal bytes
    anywhere."""
    options = read_options(SyntheticOptions, spec)
    if min(options.shape) < 1:
        raise JobError(f"data.options.shape = {list(options.shape)} should be three numbers of at least 1.")
    patterns = _patterns(options)
    num_test = max(1, options.num_samples // 5)
    return _samples(options, patterns, 0, options.num_samples), _samples(
        options, patterns, options.num_samples, num_test
    )


def _samples(options: SyntheticOptions, patterns: NDArray[np.uint8], first: int, count: int) -> ArraySet:
    size = math.prod(options.shape)
    labels = np.arange(first, first + count, dtype=np.int64) % options.num_classes
    images = _random_bytes(_NOISE, first, count, size).reshape(count, *options.shape)
    images >>= 1
    images += patterns[labels] >> 1
    channels = options.shape[0]
    return ArraySet(images, labels, options.num_classes, (0.5,) * channels, (0.2,) * channels)


def _patterns(options: SyntheticOptions) -> NDArray[np.uint8]:
    """(num_classes, C, H, W): patches of one value each."""
    channels, height, width = options.shape
    rows, columns = -(-height // _CELL), -(-width // _CELL)
    cells = _random_bytes(_PATTERNS, 0, options.num_classes, channels * rows * columns)
    large = cells.reshape(-1, channels, rows, columns).repeat(_CELL, axis=2).repeat(_CELL, axis=3)
    return large[:, :, :height, :width]


def _random_bytes(use: int, first: int, count: int, size: int) -> NDArray[np.uint8]:
    """(count, size) bytes; row i depends on `use` and on first + i alone."""
    words = -(-size // 8)
    rows = np.empty((count, size), np.uint8)
    step = max(1, _CHUNK_WORDS // words)
    for start in range(0, count, step):
        numbers = np.arange(first + start, first + min(start + step, count), dtype=np.int64)
        keys = numbers[:, None] * words + np.arange(words)
        drawn = hash_keys(0, random_streams.SYNTHETIC, use, keys).astype("<u8").view(np.uint8)
        rows[start : start + step] = drawn[:, :size]
    return rows
