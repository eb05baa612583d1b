"""A run as its folder shows it while it trains: loss, times, evaluation, workers, events."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import PacelineError
from paceline.regular_files import read_json
from paceline.spec.job import JOB_FILE, flat
from paceline.spec.record import RECORD_FILE, StepTime
from paceline.spec.run_status import STATUS_FILE, GpuUse, RunStatus, WorkerStatus

METRICS_FILE, FAILURE_FILE = "metrics.jsonl", "failure.json"
_SILENT_S = 10.0
"""The launcher writes the workers' status every second; after so long without one it is not there any more."""

State = Literal["starting", "training", "finished", "failed", "silent"]


@dataclass(frozen=True)
class WatchedRun:
    """One run, as it is now."""

    name: str
    """The name of its folder."""
    state: State
    sentence: str
    """What to know about it first."""
    job: Mapping[str, str]
    """Key to value, as texts; keys of tables with a dot."""
    step: int
    """The last one known."""
    loss: float | None
    """Of the latest global batch that was logged; None: none was, or it is not finite."""
    samples_per_s: float | None
    step_time: StepTime | None
    """Where the time of the latest steps went, on rank 0."""
    evaluation: Mapping[str, float]
    """The metrics of the last one."""
    workers: tuple[WorkerStatus, ...]
    processor_use: Mapping[int, float]
    """Processors that each rank kept busy since the status before: 1.0 is one processor."""
    gpus: Mapping[int, GpuUse]
    """What each rank on this machine uses of its GPU, where that is known."""
    events: tuple[tuple[float, str], ...]
    """(seconds since the epoch, sentence), the latest first."""


class RunFollower:
    """Reads a run folder again and again; of the metrics only what is new."""

    def __init__(self, folder: Path) -> None:
        """Follow a folder.

        Raises:
            PacelineError: there is no such folder.
        """
        if not folder.is_dir():
            raise PacelineError(f"There is no run folder '{folder}'.")
        self._folder = folder
        self._inode, self._read_bytes = 0, 0
        self._latest: dict[str, Any] = {}
        self._epochs: list[tuple[float, str]] = []
        self._status: RunStatus | None = None
        self._processor_use: dict[int, float] = {}

    def read(self, gpus: Mapping[int, GpuUse] | None = None) -> WatchedRun:
        """The run now.

        Args:
            gpus: by process id, what programs use of this machine's GPUs.
        """
        self._read_metrics()
        status, before = RunStatus.read(self._folder / STATUS_FILE), self._status
        if status is not None and before is not None and status.time > before.time:
            used_s = {worker.pid: worker.processor_s for worker in before.workers}
            for worker in status.workers:
                earlier_s = used_s.get(worker.pid)
                if earlier_s is not None and worker.processor_s is not None:
                    self._processor_use[worker.rank] = (worker.processor_s - earlier_s) / (status.time - before.time)
        self._status = status
        record, failure = _mapping(self._folder / RECORD_FILE), _mapping(self._folder / FAILURE_FILE)
        last_s = status.time if status is not None else _modified_s(self._folder / METRICS_FILE)
        latest, by_pid = self._latest, gpus or {}
        state, sentence = _state(record, failure, "loss" in latest, max(0.0, time.time() - last_s))
        workers = status.workers if status is not None else ()
        parts = [_finite(latest.get(f"step_{part}_s")) or 0.0 for part in ("total", "data", "compute", "exposed_comm")]
        metrics = {name.removeprefix("test_"): _finite(value) for name, value in latest.items() if name[:5] == "test_"}
        return WatchedRun(
            name=self._folder.resolve().name,
            state=state,
            sentence=sentence,
            job={
                key: value if isinstance(value, str) else json.dumps(value)
                for key, value in flat(_mapping(self._folder / JOB_FILE)).items()
            },
            step=max(latest.get("step", 0), *(worker.step or 0 for worker in workers), 0),
            loss=_finite(latest.get("loss")),
            samples_per_s=_finite(latest.get("samples_per_s")),
            step_time=StepTime(*parts) if "samples_per_s" in latest else None,
            evaluation={name: value for name, value in metrics.items() if value is not None},
            workers=workers if state in ("starting", "training") else (),
            processor_use=dict(self._processor_use),
            gpus={worker.rank: by_pid[worker.pid] for worker in workers if not worker.node and worker.pid in by_pid},
            events=tuple(sorted(self._events(record, failure), reverse=True)),
        )

    def _read_metrics(self) -> None:
        """Read what is new in metrics.jsonl; a file in its place is read from its beginning."""
        try:
            with open(self._folder / METRICS_FILE, "rb") as file:
                inode, size = (found := os.fstat(file.fileno())).st_ino, found.st_size
                if inode != self._inode or size < self._read_bytes:
                    self._inode, self._read_bytes, self._latest, self._epochs = inode, 0, {}, []
                file.seek(self._read_bytes)
                new = file.read()
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]  # the last line may be half written
        self._read_bytes += len(whole)
        for text in whole.splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                self._latest |= line
                if "epoch" in line and "time" in line:
                    sentence = f"Epoch {line['epoch']} ended: train loss {_finite(line.get('train_loss')) or 0:.4g}."
                    self._epochs.append((_finite(line["time"]) or 0.0, sentence))

    def _events(self, record: Mapping[str, Any], failure: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
        if started_s := _modified_s(self._folder / JOB_FILE):
            yield started_s, "The job was written; workers start."
        for manifest in self._folder.glob("checkpoints/step-*/manifest.json"):
            yield _modified_s(manifest), f"Checkpoint {manifest.parent.name} was saved."
        for earlier in map(_mapping, self._folder.glob("failure-*.json")):
            if earlier:
                yield _finite(earlier.get("noticed_at")) or 0.0, f"{earlier.get('sentence')} The run was started again."
        yield from self._epochs
        if failure:
            yield _finite(failure.get("noticed_at")) or 0.0, str(failure.get("sentence"))
        if record:
            yield _modified_s(self._folder / RECORD_FILE), "The run has finished."


def _state(
    record: Mapping[str, Any], failure: Mapping[str, Any], has_trained: bool, silent_s: float
) -> tuple[State, str]:
    if failure:
        return "failed", str(failure.get("sentence", "The run has failed."))
    if record:
        accuracy = record.get("accuracy")
        result = f", accuracy {accuracy:.2%}" if isinstance(accuracy, float) else ""
        return "finished", f"Finished after {record.get('steps')} steps{result}."
    if silent_s > _SILENT_S:
        said = f"Nothing was written for {silent_s:,.0f} s: the run has ended without a record, or is stopped."
        return "silent", said
    return ("training", "Training.") if has_trained else ("starting", "Starting.")


def _mapping(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty where there is none that can be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
