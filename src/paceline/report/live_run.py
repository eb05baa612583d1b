"""A run as its folder shows it while it trains: loss, times, evaluation, workers, events."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.errors import PacelineError
from paceline.regular_files import parse_json, read_json
from paceline.report.job_text import flat
from paceline.spec.job import JOB_FILE
from paceline.spec.record import RECORD_FILE, StepTime
from paceline.spec.run_status import STATUS_FILE, GpuUse, RunStatus, WorkerStatus

METRICS_FILE, FAILURE_FILE = "metrics.jsonl", "failure.json"
_SILENT_S = 10.0
"""The launcher writes the workers' status every second; after so long without one it is not there any more."""
_MOST_EVENTS = 30

State = Literal["starting", "training", "finished", "failed", "silent"]


@dataclass(frozen=True)
class LiveRun:
    """One run, as it is now."""

    name: str
    """The name of its folder."""
    state: State
    sentence: str
    """What to know about it first."""
    job: Mapping[str, str]
    """Key to value, as texts; keys of tables with a dot."""
    step: int = 0
    """The last one known."""
    loss: float | None = None
    """Of the latest global batch that was logged; None: none was, or it is not finite."""
    samples_per_s: float | None = None
    step_time: StepTime | None = None
    """Where the time of the latest steps went, on rank 0."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the last one."""
    workers: tuple[WorkerStatus, ...] = ()
    processor_use: Mapping[int, float] = field(default_factory=dict)
    """Processors that each rank kept busy since the status before: 1.0 is one processor."""
    gpus: Mapping[int, GpuUse] = field(default_factory=dict)
    """What each rank on this machine uses of its GPU, where that is known."""
    events: tuple[tuple[float, str], ...] = ()
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

    def read(self, gpus: Mapping[int, GpuUse] | None = None) -> LiveRun:
        """The run now.

        Args:
            gpus: by process id, what programs use of this machine's GPUs.
        """
        self._read_metrics()
        status = RunStatus.read(self._folder / STATUS_FILE)
        self._note_use(status)
        self._status = status
        record, failure = _mapping(self._folder / RECORD_FILE), _mapping(self._folder / FAILURE_FILE)
        last_s = status.time if status is not None else _modified_s(self._folder / METRICS_FILE)
        silent_s = max(0.0, time.time() - last_s)
        by_pid, latest = gpus or {}, self._latest
        state, sentence = _state(record, failure, "loss" in latest, silent_s)
        workers = status.workers if status is not None else ()
        return LiveRun(
            name=self._folder.resolve().name,
            state=state,
            sentence=sentence,
            job={key: _text(value) for key, value in flat(_mapping(self._folder / JOB_FILE)).items()},
            step=max(latest.get("step", 0), *(worker.step or 0 for worker in workers), 0),
            loss=_finite(latest.get("loss")),
            samples_per_s=_finite(latest.get("samples_per_s")),
            step_time=_step_time(latest) if "samples_per_s" in latest else None,
            evaluation=_tested(latest),
            workers=workers if state in ("starting", "training") else (),
            processor_use=dict(self._processor_use),
            gpus={worker.rank: by_pid[worker.pid] for worker in workers if not worker.node and worker.pid in by_pid},
            events=tuple(sorted(self._events(record, failure), reverse=True)[:_MOST_EVENTS]),
        )

    def _read_metrics(self) -> None:
        """Read what is new in metrics.jsonl; a file in its place is read from its beginning."""
        path = self._folder / METRICS_FILE
        try:
            found = path.stat()
            if found.st_ino != self._inode or found.st_size < self._read_bytes:
                self._inode, self._read_bytes, self._latest, self._epochs = found.st_ino, 0, {}, []
            with open(path, "rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
        except (OSError, PacelineError):
            return
        whole = new[: new.rfind(b"\n") + 1]  # the last line may be half written
        self._read_bytes += len(whole)
        for text in whole.splitlines():
            try:
                line = parse_json(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                self._latest |= line
                if "epoch" in line and "time" in line:
                    sentence = f"Epoch {line['epoch']} ended: train loss {_number(line.get('train_loss')):.4g}."
                    self._epochs.append((_number(line["time"]), sentence))

    def _note_use(self, status: RunStatus | None) -> None:
        before = self._status
        if status is None or before is None or status.time <= before.time:
            return
        used_s = {worker.pid: worker.processor_s for worker in before.workers}
        for worker in status.workers:
            earlier = used_s.get(worker.pid)
            if earlier is not None and worker.processor_s is not None:
                self._processor_use[worker.rank] = (worker.processor_s - earlier) / (status.time - before.time)

    def _events(self, record: Mapping[str, Any], failure: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
        if started_s := _modified_s(self._folder / JOB_FILE):
            yield started_s, "The job was written; workers start."
        for manifest in self._folder.glob("checkpoints/step-*/manifest.json"):
            yield _modified_s(manifest), f"Checkpoint {manifest.parent.name} was saved."
        for earlier in self._folder.glob("failure-*.json"):
            if found := _mapping(earlier):
                yield _number(found.get("noticed_at")), f"{found.get('sentence')} The run was started again."
        yield from self._epochs
        if failure:
            yield _number(failure.get("noticed_at")), str(failure.get("sentence"))
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
        return (
            "silent",
            f"Nothing was written for {silent_s:,.0f} s: the run has ended without a record, or is stopped.",
        )
    return ("training", "Training.") if has_trained else ("starting", "Starting.")


def _tested(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation, without the prefix that they have in the file."""
    values = {name.removeprefix("test_"): _finite(value) for name, value in line.items() if name.startswith("test_")}
    return {name: value for name, value in values.items() if value is not None}


def _step_time(line: Mapping[str, Any]) -> StepTime:
    return StepTime(*(_number(line.get(f"step_{part}_s")) for part in ("total", "data", "compute", "exposed_comm")))


def _mapping(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty where there is none that can be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _number(value: Any) -> float:
    return _finite(value) or 0.0
