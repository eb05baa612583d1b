"""A run as its folder shows it while it trains: losses, times, evaluations, workers, events."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
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


@dataclass
class Metrics:
    """What the lines of metrics.jsonl tell so far."""

    steps: list[int] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    """The loss of each of `steps`; None where it is not finite."""
    timed_steps: list[int] = field(default_factory=list)
    samples_per_s: list[float] = field(default_factory=list)
    """The throughput at each of `timed_steps`: the mean since the one before."""
    step_time: StepTime | None = None
    """Where the time of the latest steps went, on rank 0."""
    evaluations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    """(step, metrics) of every evaluation."""
    epochs: list[tuple[float, str]] = field(default_factory=list)
    """(seconds since the epoch, sentence) of every epoch that has ended."""

    def add(self, step: int, line: Mapping[str, Any]) -> None:
        if "loss" in line:
            self.steps.append(step)
            self.losses.append(_finite(line["loss"]))
        if "samples_per_s" in line:
            self.timed_steps.append(step)
            self.samples_per_s.append(float(line["samples_per_s"]))
            self.step_time = _step_time(line)
        if tested := _tested(line):
            self.evaluations.append((step, tested))
        if "epoch" in line and "time" in line:
            sentence = f"Epoch {line['epoch']} ended: train loss {line.get('train_loss'):.4g}."
            self.epochs.append((_number(line["time"]), sentence))

    def copy(self) -> Metrics:
        """What is known now; the lists of the original grow on in another thread."""
        lists: dict[str, Any] = {name: [*held] for name, held in vars(self).items() if isinstance(held, list)}
        return replace(self, **lists)


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
    metrics: Metrics
    workers: tuple[WorkerStatus, ...] = ()
    processor_use: Mapping[int, float] = field(default_factory=dict)
    """Processors that each rank kept busy since the status before: 1.0 is one processor."""
    gpus: Mapping[int, GpuUse] = field(default_factory=dict)
    """What each rank on this machine uses of its GPU, where that is known."""
    events: tuple[tuple[float, str], ...] = ()
    """(seconds since the epoch, sentence), the latest first."""

    @property
    def step(self) -> int:
        """The last step known."""
        return max([*self.metrics.steps[-1:], *(worker.step or 0 for worker in self.workers)], default=0)


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
        self._inode, self._read_bytes, self._metrics = 0, 0, Metrics()
        self._status: RunStatus | None = None
        self._processor_use: dict[int, float] = {}

    def read(self, gpus: Mapping[int, GpuUse] | None = None) -> LiveRun:
        """The run now.

        Args:
            gpus: by process id, what programs use of this machine's GPUs.
        """
        self._read_metrics()
        metrics = self._metrics.copy()
        status = RunStatus.read(self._folder / STATUS_FILE)
        self._note_use(status)
        self._status = status
        record, failure = _mapping(self._folder / RECORD_FILE), _mapping(self._folder / FAILURE_FILE)
        last_s = status.time if status is not None else _modified_s(self._folder / METRICS_FILE)
        silent_s = max(0.0, time.time() - last_s)
        by_pid = gpus or {}
        state, sentence = _state(record, failure, bool(metrics.losses), silent_s)
        return LiveRun(
            name=self._folder.resolve().name,
            state=state,
            sentence=sentence,
            job={key: _text(value) for key, value in flat(_mapping(self._folder / JOB_FILE)).items()},
            metrics=metrics,
            workers=status.workers if status is not None and state in ("starting", "training") else (),
            processor_use=dict(self._processor_use),
            gpus={
                worker.rank: by_pid[worker.pid]
                for worker in (status.workers if status is not None else ())
                if not worker.node and worker.pid in by_pid
            },
            events=tuple(sorted(self._events(record, failure, metrics), reverse=True)[:_MOST_EVENTS]),
        )

    def _read_metrics(self) -> None:
        """Read what is new in metrics.jsonl; a file in its place is read from its beginning."""
        path = self._folder / METRICS_FILE
        try:
            found = path.stat()
            if found.st_ino != self._inode or found.st_size < self._read_bytes:
                self._inode, self._read_bytes, self._metrics = found.st_ino, 0, Metrics()
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
                self._metrics.add(line["step"], line)

    def _note_use(self, status: RunStatus | None) -> None:
        before = self._status
        if status is None or before is None or status.time <= before.time:
            return
        used_s = {worker.pid: worker.processor_s for worker in before.workers}
        for worker in status.workers:
            earlier = used_s.get(worker.pid)
            if earlier is not None and worker.processor_s is not None:
                self._processor_use[worker.rank] = (worker.processor_s - earlier) / (status.time - before.time)

    def _events(
        self, record: Mapping[str, Any], failure: Mapping[str, Any], metrics: Metrics
    ) -> Iterator[tuple[float, str]]:
        if started_s := _modified_s(self._folder / JOB_FILE):
            yield started_s, "The job was written; workers start."
        for manifest in self._folder.glob("checkpoints/step-*/manifest.json"):
            yield _modified_s(manifest), f"Checkpoint {manifest.parent.name} was saved."
        for earlier in self._folder.glob("failure-*.json"):
            if found := _mapping(earlier):
                yield _number(found.get("noticed_at")), f"{found.get('sentence')} The run was started again."
        yield from metrics.epochs
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


def clock_text(seconds: float) -> str:
    """A time as people read it, in the zone of this machine."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
