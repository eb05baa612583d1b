"""workers.json of a run folder: what every worker was doing a moment ago, for those who watch a run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.launch.hang import WorkerState
from paceline.regular_files import replace_text, run_file_mode
from paceline.spec.codec import to_mapping
from paceline.spec.run_status import STATUS_FILE, RunStatus, WorkerStatus


def write_status(run_dir: Path, states: Sequence[WorkerState]) -> None:
    """Write the states of all workers, in their order; a file that cannot be written is left as it is."""
    workers = (
        WorkerStatus(
            rank=state.rank,
            node=state.hostname,
            pid=state.pid,
            step=state.step,
            doing=state.doing,
            is_waiting=state.inside_s is not None,
            memory_bytes=state.memory_bytes,
            processor_s=state.processor_s,
        )
        for state in states
    )
    text = json.dumps(to_mapping(RunStatus(time.time(), tuple(workers))))
    with contextlib.suppress(OSError):
        replace_text(run_dir / STATUS_FILE, text + "\n", run_file_mode())
