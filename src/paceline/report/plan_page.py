"""A forecast as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from paceline.device_count import RULE
from paceline.report.plan_plots import is_wide_range, one_device, plan_plots
from paceline.report.plan_table import columns, cost_text, run_cost, run_s, shown_rows
from paceline.report.templates import render
from paceline.spec.forecast import Forecast


def render_plan_page(forecast: Forecast) -> str:
    """The whole page."""
    return render(
        "plan_page.html",
        forecast=forecast,
        best=forecast.recommended,
        cost=lambda amount: cost_text(amount, forecast.currency),
        run_s=run_s(forecast, forecast.recommended),
        run_cost=run_cost(forecast, forecast.recommended),
        columns=[(heading.capitalize(), cell) for heading, cell in columns(forecast)],
        shown=shown_rows(forecast),
        objections=_objections(forecast),
        one_device=one_device(forecast),
        batches=_batches(forecast),
        plots=plan_plots(forecast),
        is_logarithmic=is_wide_range(forecast),
        rule=RULE,
    )


def _batches(forecast: Forecast) -> str:
    """A sentence about which batch the rows share."""
    if len({row.global_batch_size for row in forecast.rows}) == 1:
        return "The global batch stays the same."
    if len({row.global_batch_size / row.devices for row in forecast.rows}) == 1:
        return "The batch of a device stays the same."
    return "Batches differ between rows; what counts is samples a second."


def _objections(forecast: Forecast) -> list[str]:
    """Which counts cannot run the job, and why."""
    counts: dict[str, list[int]] = {}
    for row in forecast.rows:
        if row.objection:
            counts.setdefault(row.objection, []).append(row.devices)
    return [f"{_ranges(found)}: {sentence}" for sentence, found in counts.items()]


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as "3, 5 to 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if not runs or runs[-1][-1] != number - 1:
            runs.append([])
        runs[-1].append(number)
    return ", ".join(f"{run[0]:,}" if len(run) == 1 else f"{run[0]:,} to {run[-1]:,}" for run in runs)
