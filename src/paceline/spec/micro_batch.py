"""The size of a micro-batch as users give it: a number of samples, or "auto"."""

from __future__ import annotations

import re
from typing import Literal

from paceline.errors import JobError, shortened

MicroBatchSize = int | Literal["auto"]


def parse_micro_batch(text: str) -> MicroBatchSize:
    """The size that a command line or an environment variable names. Raises `JobError` for anything else."""
    if text == "auto":
        return "auto"
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise JobError(
            f"A micro-batch of '{shortened(text)}' is not possible; write a number of samples, 1 or more, or auto."
        )
    return int(text)
