"""The live page: runs side by side while they train, or afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.report import formats
from paceline.report.live_plots import live_plots
from paceline.report.live_run import LiveRun, clock_text
from paceline.report.templates import render, render_part

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
            "runs": render_part("live_runs.html", **values),
            "details": render_part("live_details.html", **values),
        },
        "figures": {plot.key: plot.figure for plot in live_plots(runs)},
    }


def _values(runs: Sequence[LiveRun]) -> dict[str, Any]:
    events = sorted(((when, run.name, said) for run in runs for when, said in run.events), reverse=True)
    return {
        "runs": runs,
        "number": lambda value: formats.NOTHING if value is None else f"{value:.4g}",
        "differences": differences(runs),
        "events": [(clock_text(when), name, said) for when, name, said in events[:30]],
    }


def differences(runs: Sequence[LiveRun]) -> list[tuple[str, list[str]]]:
    """(key, value of each run) of the job keys in which runs differ."""
    keys = sorted({key for run in runs for key in run.job})
    rows = [(key, [run.job.get(key, formats.NOTHING) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
