"""workers.json of a run folder: what every worker was doing a moment ago, for those who watch a run."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from paceline.launch.hang import WorkerState
from paceline.launch.supervise import StatesByNode
from paceline.regular_files import replace_text, run_file_mode
from paceline.spec.codec import to_mapping
from paceline.spec.run_status import STATUS_FILE, RunStatus, WorkerStatus

_INTERVAL_S = 1.0


class WorkersFile:
    """Writes the states of all workers, at most once a second; a file that cannot be written is left as it is."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / STATUS_FILE
        self._written_at = float("-inf")

    def write(self, states: StatesByNode) -> None:
        now = time.monotonic()
        if now - self._written_at < _INTERVAL_S:
            return
        self._written_at = now
        workers = sorted(
            (_status(node, state) for node, found in states for state in found), key=lambda worker: worker.rank
        )
        text = json.dumps(to_mapping(RunStatus(time.time(), tuple(workers))))
        with contextlib.suppress(OSError):
            replace_text(self._path, text + "\n", run_file_mode())


def _status(node: str, state: WorkerState) -> WorkerStatus:
    return WorkerStatus(
        rank=state.rank,
        node=node,
        pid=state.pid,
        step=state.step,
        doing=state.doing,
        is_waiting=state.inside_s is not None,
        memory_bytes=state.memory_bytes,
        processor_s=state.processor_s,
    )
