"""Saves the weights and the record at the end of a run, in another folder if its own cannot be written to."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import CheckpointError, reason_of
from paceline.regular_files import refuge

PATIENCE_S = 30.0
"""How long a place that refuses is tried again: file systems of a network come back."""
_PAUSE_S = 1.0


def save_at_the_end(write: Callable[[Path], None], run_dir: Path, say: Callable[[str], None]) -> None:
    """Call `write` with the run folder; where that fails for half a minute, with a new folder elsewhere.

    Raises:
        CheckpointError: the run folder cannot be written to; says where everything is instead.
    """
    until = time.monotonic() + PATIENCE_S
    has_told = False
    while True:
        try:
            write(run_dir)
        except OSError as error:
            problem = error
        else:
            return
        if time.monotonic() >= until:
            break
        if not has_told:
            has_told = True
            why = reason_of(problem)
            say(f"{run_dir} cannot be written to ({why}); after {PATIENCE_S:.0f} s another place is tried.")
        time.sleep(_PAUSE_S)
    why = f"The run is trained, but its folder {run_dir} cannot be written to ({reason_of(problem)})"
    folder = refuge(run_dir.name, write)
    if folder is None:
        raise CheckpointError(f"{why}, and neither can any other; its checkpoints are what is left of it.")
    raise CheckpointError(f"{why}; its weights and its record are in {folder} instead.")
