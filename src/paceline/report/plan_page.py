"""A forecast as a table for the terminal and as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.mathematics import RULE
from paceline.report import formats
from paceline.report.charts import Chart, Series, beside_ideal, step_parts
from paceline.report.page import render
from paceline.report.tables import Grid, grid_of
from paceline.spec.forecast import Forecast, ForecastRow, fastest_of_each_count
from paceline.words import and_more

_MOST_ROWS = 24
"""Beyond so many, tables leave counts out; the JSON and the page's second table have them all."""


def plan_table(forecast: Forecast) -> RenderableType:
    """The verdict, the rows with the recommended one marked, where more devices stop paying, and the best meshes."""
    rows = _shown_rows(forecast)
    grown = ", batch grows with the devices" if forecast.grow == "batch" else ""
    lines: list[RenderableType] = [
        Text(f"{forecast.job} on {forecast.device} ({forecast.device_kind}){grown}", style="bold"),
        _grid(forecast, rows),
    ]
    if any(row.objection for row in rows):
        lines.append(Text("Grey rows need another job or a larger device.", style="dim"))
    if len(rows) < len(forecast.rows):
        lines.append(Text(f"{len(rows)} of {len(forecast.rows)} counts; the page has all of them."))
    lines += [Text(f"\n{forecast.verdict}", style="bold"), Text(forecast.reason)]
    if forecast.past_error:
        lines.append(Text(f"Forecasts for this cluster were right {forecast.past_error}."))
    if forecast.strategy:
        lines.append(Text("\n" + "\n".join(forecast.strategy)))
    if forecast.assumptions:
        lines.append(Text("\n" + "\n".join(forecast.assumptions)))
    return Group(*lines)


def _shown_rows(forecast: Forecast) -> list[ForecastRow]:
    """The rows to show: all, or if there are many, powers of two, the first, the last and the recommended one."""
    rows = forecast.rows
    kept = {rows[0].devices, rows[-1].devices, forecast.recommended_devices}
    return [row for row in rows if len(rows) <= _MOST_ROWS or row.devices in kept or row.devices.bit_count() == 1]


def _grid(forecast: Forecast, rows: list[ForecastRow]) -> Grid:
    grows = forecast.grow == "batch"  # else the samples to the target are one number, which the page's head says

    def micro_batch(row: ForecastRow) -> str:
        size = f"{row.micro_batch_size:,}"
        return size if row.num_micro_batches == 1 else f"{row.num_micro_batches} x {size}"

    def memory(row: ForecastRow) -> str:
        return "" if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.1f} GiB"

    cost = f"cost of {_cost_of(forecast)}"
    columns: list[tuple[str, Callable[[ForecastRow], str]]] = [
        ("devices", lambda row: f"{row.devices:,}"),
        ("nodes", lambda row: f"{row.nodes:,}"),
        ("placement", lambda row: row.placement),
        ("algorithm", lambda row: row.algorithm if row.devices > 1 else formats.NOTHING),
        ("micro-batch", micro_batch),
        ("step", lambda row: formats.duration(row.step_s)),
        ("compute", lambda row: formats.duration(row.compute_s)),
        ("waits", lambda row: formats.duration(row.exposed_s)),
        ("bound by", lambda row: row.bound_by),
        ("samples/s", lambda row: formats.quantity(row.samples_per_s)),
        ("speed-up", lambda row: formats.times(row.speedup)),
        ("efficiency", lambda row: formats.percent(row.efficiency, 0)),
        ("useful", lambda row: formats.percent(row.useful_efficiency, 0)),
        ("memory", memory),
        ("samples to target", lambda row: formats.quantity(row.samples_to_target) if grows else ""),
        ("time to target", lambda row: formats.duration(row.time_to_target_s)),
        ("run", lambda row: formats.duration(_run_s(forecast, row))),
        (cost, lambda row: _money(forecast, _cost(forecast, row))),
    ]
    return grid_of(
        columns,
        rows,
        recommended=rows.index(forecast.recommended),
        impossible=[place for place, row in enumerate(rows) if row.objection],
        left=("placement", "algorithm", "bound by"),
        least_important=(
            *("memory", "samples to target", "compute", "waits", "nodes", "placement", "algorithm", "micro-batch"),
            *("useful", "samples/s", cost, "time to target", "run"),
        ),
    )


def _run_s(forecast: Forecast, row: ForecastRow) -> float | None:
    """Seconds of all the job's epochs; None where their samples are not known, or a target counts."""
    if forecast.run_samples is None or row.samples_to_target is not None:
        return None
    return forecast.run_samples / row.samples_per_s


def _cost(forecast: Forecast, row: ForecastRow) -> float | None:
    """The cost of training to the target, else of all epochs, else of a million samples; None without a price."""
    seconds, price = _run_s(forecast, row), forecast.price_per_device_hour
    if seconds is None or price is None:
        return row.cost_to_target or row.cost_per_million_samples
    return price * row.devices * seconds / 3600


def _cost_of(forecast: Forecast) -> str:
    """The work that `_cost` pays for."""
    if forecast.rows[0].cost_to_target is not None:
        return "the target"
    return "a million samples" if forecast.run_samples is None else "the run"


def _money(forecast: Forecast, amount: float | None) -> str:
    """ "3.14 EUR", or without the currency where it is not known."""
    if amount is None:
        return formats.NOTHING
    return f"{amount:,.{0 if amount >= 100 else 2}f} {forecast.currency}".rstrip()


def plan_page(forecast: Forecast) -> str:
    """The whole page."""
    rows, best = _shown_rows(forecast), forecast.recommended
    impossible: dict[str, list[str]] = {}
    for row in forecast.rows:
        if row.objection:
            impossible.setdefault(row.objection, []).append(f"{row.devices:,}")
    return render(
        "plan.html",
        forecast=forecast,
        best=best,
        run_s=_run_s(forecast, best),
        cost=_money(forecast, _cost(forecast, best)),
        cost_of=_cost_of(forecast),
        price=_money(forecast, forecast.price_per_device_hour),
        grid=_grid(forecast, rows),
        all_rows=_grid(forecast, list(forecast.rows)) if len(rows) < len(forecast.rows) else None,
        objections=[f"{', '.join(of[:8])}{and_more(len(of) - 8)}: {why}" for why, of in impossible.items()],
        one_device="one device" if forecast.base_devices == 1 else f"one of {forecast.base_devices} devices",
        rule=RULE,
        charts=_charts(replace(forecast, rows=fastest_of_each_count(forecast.rows))),
    )


def _charts(forecast: Forecast) -> list[Chart]:
    """Throughput and the parts of a step, of the fastest row of each count."""
    rows, first = forecast.rows, forecast.rows[0]
    throughput = Series(
        "line",
        [row.devices for row in rows],
        [row.samples_per_s for row in rows],
        "forecast",
        "series-1",
        low=[row.samples_per_s * row.step_s / row.high_s for row in rows],
        high=[row.samples_per_s * row.step_s / row.low_s for row in rows],
    )
    caption = "The coloured area is the 90 % prediction interval; the dashed line is what one device does, times n."
    per_device = first.samples_per_s / first.speedup
    text = ("Throughput", "samples/s", caption)
    shown = _shown_rows(forecast)
    parts = [
        ("compute", "part-compute", [row.compute_s for row in shown]),
        ("waiting for gradients", "part-communication", [row.exposed_s for row in shown]),
        (
            "loader, optimizer, stragglers",
            "part-other",
            [max(0.0, row.step_s - row.compute_s - row.exposed_s) for row in shown],
        ),
    ]
    return [
        beside_ideal(throughput, per_device, forecast.recommended_devices, text),
        step_parts([row.devices for row in shown], parts, "Communication that compute hides is not in it."),
    ]
