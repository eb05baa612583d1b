"""Runs as their folders show them while they train or afterwards, side by side as tables for a terminal."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.diagnosis.failures import WorkerProcess, read_notes
from paceline.errors import PacelineError
from paceline.report.formats import NOTHING, duration, percent, quantity
from paceline.report.tables import Grid, grid_of
from paceline.spec.job import JOB_FILE, flattened
from paceline.spec.record import RECORD_FILE, STATUS_FILE, GpuUse, RunStatus, WorkerStatus
from paceline.words import size

METRICS_FILE, FAILURE_FILE = "metrics.jsonl", "failure.json"
_SILENT_S = 10.0
"""The launcher writes the workers' status every second; after so long without one it is not there any more."""
_TAIL_BYTES = 1 << 20
"""How much of the end of the metrics is read, some 10,000 lines."""
_MOST_EVENTS = 8
Fields = Mapping[str, Any]
"""A JSON object of a run's files."""


@dataclass(frozen=True)
class WatchedRun:
    """One run, as it is now."""

    name: str
    """The name of its folder."""
    state: str
    """ "starting", "training", "finished", "stopped", "failed", "silent"; "running" is a script that tells no steps."""
    sentence: str
    """What to know about it first."""
    job: Mapping[str, str]
    """Key to value, as texts; keys of tables with a dot."""
    metrics: Mapping[str, Any]
    """The latest value of each name that was logged, as in metrics.jsonl."""
    workers: tuple[WorkerStatus, ...]
    events: tuple[tuple[float, str], ...]
    """(seconds since the epoch, sentence), the latest first."""

    def number(self, name: str) -> float | None:
        """A value of the metrics; None where there is none, or it is not finite."""
        return _number(self.metrics, name)


def read_run(folder: Path) -> WatchedRun:
    """A run now, from the files in its folder. Raises `PacelineError` where there are none."""
    last_s = max(_modified_s(folder / name) for name in (JOB_FILE, "workers", METRICS_FILE, STATUS_FILE, RECORD_FILE))
    if not last_s:
        raise PacelineError(f"There is no run in '{folder}'; name a folder that paceline train or launch wrote into.")
    lines, status = _last_lines(folder / METRICS_FILE), None
    with contextlib.suppress(PacelineError):  # there is none, or it is damaged
        status = RunStatus.load(folder / STATUS_FILE)
    metrics = {name: value for line in lines for name, value in line.items()}
    record, failure = _mapping(folder / RECORD_FILE), _mapping(folder / FAILURE_FILE)
    notes, workers = read_notes(folder), () if status is None else status.workers
    phase = "training" if "loss" in metrics or any(worker.step for worker in workers) else "starting"
    this_node = (socket.gethostname(), "localhost", "127.0.0.1", "::1")  # as `--hosts` may name it
    here = [one for one in notes if one.hostname in this_node and one.exit_code is None]
    if status is None and any(Path(f"/proc/{one.pid}").exists() for one in here):
        last_s = time.time()  # a worker that is alone writes no status, nor do those of any other script
        phase = phase if (folder / JOB_FILE).exists() else "running"
    state, sentence = _state(record, failure, notes, phase, time.time() - last_s)
    steps = [_number(metrics, "step"), *(one.step for one in workers), *(one.step for one in notes)]
    return WatchedRun(
        name=folder.resolve().name,
        state=state,
        sentence=sentence,
        job={key: str(value) for key, value in flattened(_mapping(folder / JOB_FILE)).items()},
        metrics={**metrics, "step": max((one for one in steps if one is not None), default=None)},
        workers=workers if state in ("starting", "training") else (),
        events=tuple(sorted(_events(folder, lines, record, failure), reverse=True)),
    )


def _last_lines(path: Path) -> list[dict[str, Any]]:
    """The last whole lines of the metrics."""
    found = []
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        for text in file:
            with contextlib.suppress(ValueError, TypeError):  # the first is cut, the last may be half written
                found.append(dict(json.loads(text)))
    return found


def _events(folder: Path, lines: Sequence[Fields], record: Fields, failure: Fields) -> Iterator[tuple[float, str]]:
    if started_s := _modified_s(folder / JOB_FILE):
        yield started_s, "The job was written; workers start."
    for manifest in folder.glob("checkpoints/step-*/manifest.json"):
        yield _modified_s(manifest), f"Checkpoint {manifest.parent.name} was saved."
    for earlier in map(_mapping, folder.glob("failure-*.json")):
        if earlier:
            yield _number(earlier, "noticed_at") or 0.0, f"{earlier.get('sentence')} The run was started again."
    for line in lines:
        if "epoch" in line and "time" in line:
            loss = _number(line, "train_loss") or 0.0
            yield _number(line, "time") or 0.0, f"Epoch {line['epoch']}: train loss {loss:.4g}."
    if failure:
        yield _number(failure, "noticed_at") or 0.0, str(failure.get("sentence"))
    if record:
        yield _modified_s(folder / RECORD_FILE), "The run has finished."


def _state(
    record: Fields, failure: Fields, notes: Sequence[WorkerProcess], phase: str, silent_s: float
) -> tuple[str, str]:
    if failure:
        return "failed", str(failure.get("sentence", "The run has failed."))
    if record:
        accuracy = record.get("accuracy")
        result = f", accuracy {accuracy:.2%}" if isinstance(accuracy, float) else ""
        return "finished", f"Finished after {record.get('steps')} steps{result}."
    if (codes := {note.exit_code for note in notes}) == {0}:
        return "finished", "All workers have ended."
    if codes and codes <= {0, -2, -15, 130, 143}:  # by SIGINT or SIGTERM
        return "stopped", "Stopped by Ctrl-C or another signal; the same command goes on from its checkpoint, if any."
    if silent_s > _SILENT_S:
        return "silent", f"Nothing was written for {silent_s:,.0f} s: the run ended without a record, or is stopped."
    return phase, f"{phase.capitalize()}."


def _mapping(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_text("utf-8")))
    return {}


def _modified_s(path: Path) -> float:
    with contextlib.suppress(OSError):  # there is none, or it was just removed
        return path.stat().st_mtime
    return 0.0


def _number(mapping: Mapping[str, Any], name: str) -> float | None:
    """None where there is none, or it is not finite."""
    value = mapping.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# --- the tables ---


def watch_table(runs: Sequence[WatchedRun], gpus: Mapping[int, GpuUse]) -> RenderableType:
    """Loss, throughput, where the time of a step goes, every worker, how the jobs differ, and what happened. `gpus`: by
    process id, what programs use of this machine's GPUs."""

    def evaluation(run: WatchedRun) -> str:
        found = {name.removeprefix("test_"): run.number(name) for name in run.metrics if name.startswith("test_")}
        return ", ".join(f"{name} {value:.4g}" for name, value in found.items() if value is not None)

    columns = [
        ("run", lambda run: run.name),
        ("state", lambda run: run.state),
        ("step", lambda run: NOTHING if run.number("step") is None else f"{run.number('step'):,.0f}"),
        ("loss", lambda run: NOTHING if run.number("loss") is None else f"{run.number('loss'):.4g}"),
        ("samples/s", lambda run: quantity(run.number("samples_per_s"))),
        ("step time", _step_time),
        ("last evaluation", evaluation),
    ]
    parts: list[RenderableType] = [grid_of(columns, runs, left=("run", "state", "step time", "last evaluation"))]
    parts += [Text(f"{run.name}: {run.sentence}", style="bold") for run in runs if run.state != "training"]
    for run in runs:
        if run.workers:
            parts += [Text(f"\nWorkers of {run.name}", style="bold"), _workers(run, gpus)]
    keys = sorted({key for run in runs for key in run.job})
    rows = [(key, *(run.job.get(key, NOTHING) for run in runs)) for key in keys]
    if differing := [row for row in rows if len(set(row[1:])) > 1]:
        grid = Grid(["key", *(run.name for run in runs)], differing, left=("key",))
        parts += [Text("\nHow their jobs differ", style="bold"), grid]
    events = sorted(((when, run.name, said) for run in runs for when, said in run.events), reverse=True)
    parts += [Text("\nEvents", style="bold")] * bool(events)
    for when, name, said in events[:_MOST_EVENTS]:
        parts.append(Text(f"{datetime.fromtimestamp(when):%H:%M:%S}  {f'{name}  ' * (len(runs) > 1)}{said}"))
    return Group(*parts, "")  # without it the last line in a pipe has no end


def _step_time(run: WatchedRun) -> str:
    total_s = run.number("step_total_s")
    if not total_s:
        return ""
    names = {"compute": "compute", "data": "data", "exposed communication": "exposed_comm"}
    shares = {name: (run.number(f"step_{key}_s") or 0.0) / total_s for name, key in names.items()}
    return f"{duration(total_s)}: {', '.join(f'{name} {percent(share, 0)}' for name, share in shares.items())}"


def _workers(run: WatchedRun, gpus: Mapping[int, GpuUse]) -> Grid:
    def gpu(worker: WorkerStatus) -> str:
        use = gpus.get(worker.pid) if worker.node == socket.gethostname() else None
        if use is None:
            return NOTHING
        held = "" if use.memory_bytes is None else f", {size(use.memory_bytes)}"
        return f"{use.index}{held}" + ("" if use.busy is None else f", {use.busy:.0%} busy")

    columns = [
        ("rank", lambda worker: str(worker.rank)),
        ("node", lambda worker: worker.node),
        ("step", lambda worker: NOTHING if worker.step is None else f"{worker.step:,}"),
        ("memory", lambda worker: NOTHING if worker.memory_bytes is None else size(worker.memory_bytes)),
        ("GPU", gpu),
        ("doing", lambda worker: worker.doing),
    ]
    return grid_of(columns, run.workers, left=("node", "GPU", "doing"))
