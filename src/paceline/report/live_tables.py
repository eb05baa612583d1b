"""Runs side by side while they train, or afterwards, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.report.figure import STEP_PARTS
from paceline.report.formats import NOTHING, megabytes_text, percent, quantity
from paceline.report.live_run import LiveRun
from paceline.report.tables import plain_table, table
from paceline.spec.record import StepTime
from paceline.spec.run_status import GpuUse

_MOST_EVENTS = 8


def live_tables(runs: Sequence[LiveRun]) -> RenderableType:
    """Loss, throughput, where the time of a step goes, every worker, how the jobs differ, and what happened."""
    parts: list[RenderableType] = [_runs(runs)]
    parts += [Text(f"{run.name}: {run.sentence}", style="bold") for run in runs if run.state != "training"]
    for run in runs:
        if run.workers:
            parts += [Text(f"\nWorkers of {run.name}", style="bold"), _workers(run)]
    if differing := differences(runs):
        found = table("key", *(run.name for run in runs), left=("key",))
        for key, values in differing:
            found.add_row(key, *values)
        parts += [Text("\nHow their jobs differ", style="bold"), found]
    events = sorted(((when, run.name, said) for run in runs for when, said in run.events), reverse=True)
    rows = [
        (datetime.fromtimestamp(when).strftime("%H:%M:%S"), *([name] if len(runs) > 1 else []), said)
        for when, name, said in events[:_MOST_EVENTS]
    ]
    return Group(*parts, Text("\nEvents", style="bold"), plain_table([[Text(cell) for cell in row] for row in rows]))


def _runs(runs: Sequence[LiveRun]) -> RenderableType:
    headings = ("run", "state", "workers", "step", "loss", "samples/s", "step time", "last evaluation")
    found = table(*headings, left=("run", "state", "step time", "last evaluation"))
    for run in runs:
        evaluation = ", ".join(f"{name} {value:.4g}" for name, value in run.evaluation.items())
        found.add_row(
            run.name,
            run.state,
            str(len(run.workers) or NOTHING),
            f"{run.step:,}",
            NOTHING if run.loss is None else f"{run.loss:.4g}",
            quantity(run.samples_per_s),
            _step_time(run.step_time),
            evaluation or NOTHING,
        )
    return found


def _step_time(time: StepTime | None) -> str:
    if time is None or not time.total_s:
        return NOTHING
    parts = ", ".join(f"{name} {percent(getattr(time, part) / time.total_s, 0)}" for name, _, part in STEP_PARTS)
    return f"{1e3 * time.total_s:.3g} ms: {parts}"


def _workers(run: LiveRun) -> RenderableType:
    found = table("rank", "node", "step", "memory (MB)", "processors", "GPU", "doing", left=("node", "GPU", "doing"))
    for worker in run.workers:
        used = run.processor_use.get(worker.rank)
        found.add_row(
            str(worker.rank),
            worker.node or "this node",
            NOTHING if worker.step is None else f"{worker.step:,}",
            megabytes_text(worker.memory_bytes),
            NOTHING if used is None else f"{used:.2f}",
            _gpu(run.gpus.get(worker.rank)),
            worker.doing,
        )
    return found


def _gpu(use: GpuUse | None) -> str:
    if use is None:
        return NOTHING
    memory = "" if use.memory_bytes is None else f", {use.memory_bytes / 2**30:.1f} GiB"
    return f"{use.index}{memory}" + ("" if use.busy is None else f", {use.busy:.0%} busy")


def differences(runs: Sequence[LiveRun]) -> list[tuple[str, list[str]]]:
    """(key, value of each run) of the job keys in which runs differ."""
    keys = sorted({key for run in runs for key in run.job})
    rows = [(key, [run.job.get(key, NOTHING) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
