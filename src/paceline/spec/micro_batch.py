"""The size of a micro-batch as users give it: a number of samples, or "auto"."""

from __future__ import annotations

from typing import Literal

from paceline.errors import JobError

MicroBatchSize = int | Literal["auto"]


def parse_micro_batch(text: str) -> MicroBatchSize:
    """The size that a command line or an environment variable names. Raises `JobError` for anything else."""
    if text == "auto":
        return "auto"
    if not text.isdigit() or int(text) < 1:
        raise JobError(f"A micro-batch of {text!r} is not possible; write a number of samples, 1 or more, or auto.")
    return int(text)
