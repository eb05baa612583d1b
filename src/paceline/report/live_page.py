"""The live page: runs side by side while they train, or afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from paceline.report import formats
from paceline.report.figure import series_color
from paceline.report.live_plots import live_plots
from paceline.report.live_run import LiveRun, clock_text
from paceline.report.templates import render, shortened
from paceline.spec.run_status import WorkerStatus

INTERVAL_S = 1.0
"""How often the page asks for what is new."""


def render_live_page(runs: Sequence[LiveRun]) -> str:
    """The whole page, which asks the address "now" beside its own for `live_update`."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return render(
        "live_page.html", title=title, plots=live_plots(runs), interval_ms=round(1000 * INTERVAL_S), **_values(runs)
    )


def live_update(runs: Sequence[LiveRun]) -> dict[str, Any]:
    """What changes on the page, fit for JSON: HTML by the id of its element, and figures by their keys."""
    values = _values(runs)
    return {
        "parts": {
            "runs": render("live_runs.html", **values),
            "details": render("live_details.html", **values),
        },
        "figures": {plot.key: plot.figure for plot in live_plots(runs)},
    }


def _values(runs: Sequence[LiveRun]) -> dict[str, Any]:
    events = sorted(((when, run.name, said) for run in runs for when, said in run.events), reverse=True)
    return {
        "runs": runs,
        "run_columns": _RUN_COLUMNS,
        "color": lambda run: series_color(runs.index(run)),
        "worker_columns": _worker_columns,
        "differences": differences(runs),
        "difference_columns": [
            ("Key", lambda row: row[0]),
            *((run.name, lambda row, place=place: _words(row[1][place], 60)) for place, run in enumerate(runs)),
        ],
        "events": [(clock_text(when), name, said) for when, name, said in events[:30]],
    }


def _number(value: float | None) -> str:
    return formats.NOTHING if value is None else f"{value:.4g}"


def _words(text: str, most: int) -> Markup:
    """A cell that may take several lines."""
    return Markup('<span class="words">{}</span>').format(shortened(text, most))


_RUN_COLUMNS: tuple[tuple[str, Callable[[LiveRun], str]], ...] = (
    ("Run", lambda run: run.name),
    ("State", lambda run: Markup('<span class="state" data-state="{0}">{0}</span>').format(run.state)),
    ("Workers", lambda run: str(len(run.workers) or formats.NOTHING)),
    ("Step", lambda run: f"{run.step:,}"),
    ("Loss", lambda run: _number(run.metrics.losses[-1] if run.metrics.losses else None)),
    ("Samples/s", lambda run: formats.quantity(run.metrics.samples_per_s[-1] if run.metrics.samples_per_s else None)),
    ("Last evaluation", lambda run: _last_evaluation(run)),
)


def _last_evaluation(run: LiveRun) -> str:
    metrics = run.metrics.evaluations[-1][1] if run.metrics.evaluations else {}
    return ", ".join(f"{name} {_number(value)}" for name, value in metrics.items()) or formats.NOTHING


def _worker_columns(run: LiveRun) -> list[tuple[str, Callable[[WorkerStatus], str]]]:
    def processors(worker: WorkerStatus) -> str:
        used = run.processor_use.get(worker.rank)
        return formats.NOTHING if used is None else f"{used:.2f}"

    def gpu(worker: WorkerStatus) -> str:
        use = run.gpus.get(worker.rank)
        if use is None:
            return formats.NOTHING
        memory = "" if use.memory_bytes is None else f", {use.memory_bytes / 2**30:.1f} GiB"
        return f"GPU {use.index}{memory}" + ("" if use.busy is None else f", {use.busy:.0%} busy")

    return [
        ("Rank", lambda worker: str(worker.rank)),
        ("Node", lambda worker: worker.node or "this node"),
        ("Step", lambda worker: formats.NOTHING if worker.step is None else f"{worker.step:,}"),
        ("Memory (MB)", lambda worker: formats.megabytes_text(worker.memory_bytes)),
        ("Processors in use", processors),
        *([("GPU", gpu)] if run.gpus else []),
        ("Doing", lambda worker: _words(worker.doing, 80)),
    ]


def differences(runs: Sequence[LiveRun]) -> list[tuple[str, list[str]]]:
    """(key, value of each run) of the job keys in which runs differ."""
    keys = sorted({key for run in runs for key in run.job})
    rows = [(key, [run.job.get(key, formats.NOTHING) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
