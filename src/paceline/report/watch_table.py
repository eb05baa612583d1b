"""Runs side by side while they train, or afterwards, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.report.formats import NOTHING, percent, quantity
from paceline.report.tables import grid_of, plain_table
from paceline.report.watched_run import WatchedRun
from paceline.spec.run_status import WorkerStatus
from paceline.words import three_digits

_MOST_EVENTS = 8


def watch_table(runs: Sequence[WatchedRun]) -> RenderableType:
    """Loss, throughput, where the time of a step goes, every worker, how the jobs differ, and what happened."""
    columns = [
        ("run", lambda run: run.name),
        ("state", lambda run: run.state),
        ("workers", lambda run: str(len(run.workers) or NOTHING)),
        ("step", lambda run: f"{run.step:,}"),
        ("loss", lambda run: NOTHING if run.loss is None else f"{run.loss:.4g}"),
        ("samples/s", lambda run: quantity(run.samples_per_s)),
        ("step time", _step_time),
        ("last evaluation", lambda run: ", ".join(f"{name} {value:.4g}" for name, value in run.evaluation.items())),
    ]
    parts: list[RenderableType] = [grid_of(columns, runs, left=("run", "state", "step time", "last evaluation"))]
    parts += [Text(f"{run.name}: {run.sentence}", style="bold") for run in runs if run.state != "training"]
    for run in runs:
        if run.workers:
            parts += [Text(f"\nWorkers of {run.name}", style="bold"), _workers(run)]
    keys = sorted({key for run in runs for key in run.job})
    rows = [(key, *(run.job.get(key, NOTHING) for run in runs)) for key in keys]
    if differing := [row for row in rows if len(set(row[1:])) > 1]:
        headings = [("key", 0), *((run.name, place) for place, run in enumerate(runs, start=1))]
        columns_of_jobs = [(name, lambda row, place=place: row[place]) for name, place in headings]
        parts += [Text("\nHow their jobs differ", style="bold"), grid_of(columns_of_jobs, differing, left=("key",))]
    events = sorted(((when, run.name, said) for run in runs for when, said in run.events), reverse=True)
    told = [
        (datetime.fromtimestamp(when).strftime("%H:%M:%S"), Text(name if len(runs) > 1 else ""), Text(said))
        for when, name, said in events[:_MOST_EVENTS]
    ]
    return Group(*parts, Text("\nEvents", style="bold"), plain_table(told))


def _step_time(run: WatchedRun) -> str:
    step = run.step_time
    if step is None or not step.total_s:
        return ""
    parts = {"compute": step.compute_s, "data": step.data_s, "exposed communication": step.exposed_comm_s}
    shares = ", ".join(f"{name} {percent(seconds / step.total_s, 0)}" for name, seconds in parts.items())
    return f"{1e3 * step.total_s:.3g} ms: {shares}"


def _workers(run: WatchedRun) -> RenderableType:
    def memory(worker: WorkerStatus) -> str:
        return NOTHING if worker.memory_bytes is None else three_digits(worker.memory_bytes / 1e6)

    def processors(worker: WorkerStatus) -> str:
        return f"{run.processor_use[worker.rank]:.2f}" if worker.rank in run.processor_use else NOTHING

    def gpu(worker: WorkerStatus) -> str:
        use = run.gpus.get(worker.rank)
        if use is None:
            return NOTHING
        held = "" if use.memory_bytes is None else f", {use.memory_bytes / 2**30:.1f} GiB"
        return f"{use.index}{held}" + ("" if use.busy is None else f", {use.busy:.0%} busy")

    columns = [
        ("rank", lambda worker: str(worker.rank)),
        ("node", lambda worker: worker.node or "this node"),
        ("step", lambda worker: NOTHING if worker.step is None else f"{worker.step:,}"),
        ("memory (MB)", memory),
        ("processors", processors),
        ("GPU", gpu),
        ("doing", lambda worker: worker.doing),
    ]
    return grid_of(columns, run.workers, left=("node", "GPU", "doing"))
