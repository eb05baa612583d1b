"""A text file as bytes: a language model's vocabulary of 256 that needs no training and no tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.arrays import ArraySet
from paceline.data.sources import read_options
from paceline.errors import DataError
from paceline.spec import DataSpec
from paceline.spec.codec import at_least

NUM_TOKENS = 256


@dataclass(frozen=True)
class TextOptions:
    file: str
    """A path, relative to data.dir if that is given."""
    context: int = at_least(1, 128)
    """Tokens in a sample."""


def load_text(spec: DataSpec) -> tuple[ArraySet, ArraySet]:
    """Consecutive samples of `context` bytes, the target of each byte being the next; the last tenth is for
    testing.

    The arrays are views of the mapped file: no copy, a byte a token.

    Raises:
        DataError: no such file, or too short for one sample of either split.
    """
    options = read_options(TextOptions, spec)
    path = Path(spec.dir or ".").expanduser() / Path(options.file).expanduser()
    try:
        num_bytes = path.stat().st_size
        tokens = np.memmap(path, np.uint8, mode="r") if num_bytes else np.empty(0, np.uint8)
    except OSError as problem:
        raise DataError(f"data.options.file: {path} cannot be read ({problem.strerror}); name a text file.") from None
    cut = num_bytes * 9 // 10
    if min(cut, num_bytes - cut) <= options.context:
        raise DataError(
            f"{path} has {num_bytes} bytes; data.options.context = {options.context} needs at least "
            f"{10 * options.context + 1}, since the last tenth is for testing."
        )
    return _windows(tokens[:cut], options.context), _windows(tokens[cut:], options.context)


def _windows(tokens: NDArray[Any], context: int) -> ArraySet:
    num_samples = (len(tokens) - 1) // context
    end = num_samples * context
    return ArraySet(
        inputs=tokens[:end].reshape(num_samples, context),
        targets=tokens[1 : end + 1].reshape(num_samples, context),
        num_classes=NUM_TOKENS,
    )
