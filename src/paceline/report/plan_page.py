"""A forecast as a table for the terminal and as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.device_count import RULE
from paceline.report import formats
from paceline.report.charts import Chart, Series, amounts, beside_ideal, fill_the_grid, step_parts
from paceline.report.page import render
from paceline.report.tables import Grid, grid_of
from paceline.spec.forecast import Forecast, ForecastRow

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
    lines += [Text(f"\n{forecast.verdict}", style="bold"), Text(forecast.reason), Text(forecast.bend)]
    if forecast.past_error:
        lines.append(Text(f"Forecasts for this cluster were right {forecast.past_error}."))
    if forecast.strategy:
        lines.append(Text("\n" + "\n".join(forecast.strategy)))
    if said := (*forecast.warnings, *forecast.assumptions):
        lines.append(Text("\n" + "\n".join(said)))
    return Group(*lines)


def _shown_rows(forecast: Forecast) -> list[ForecastRow]:
    """The rows to show: all, or if there are many, powers of two, the first, the last and the recommended one."""
    rows = forecast.rows
    kept = {rows[0].devices, rows[-1].devices, forecast.recommended_devices}
    return [row for row in rows if len(rows) <= _MOST_ROWS or row.devices in kept or row.devices.bit_count() == 1]


def _grid(forecast: Forecast, rows: list[ForecastRow]) -> Grid:
    grows = forecast.grow == "batch"  # else the samples to the target are one number, which the page's head says
    has_target = rows[0].samples_to_target is not None

    def micro_batch(row: ForecastRow) -> str:
        size = f"{row.micro_batch_size:,}"
        return size if row.num_micro_batches == 1 else f"{row.num_micro_batches} x {size}"

    def memory(row: ForecastRow) -> str:
        return "" if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.1f} GiB"

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
        ("run", lambda row: "" if has_target else formats.duration(_run_s(forecast, row))),
        (f"cost of {_cost_of(forecast)}", lambda row: _money(forecast, _cost(forecast, row))),
    ]
    return grid_of(
        columns,
        rows,
        recommended=rows.index(forecast.recommended),
        impossible=[place for place, row in enumerate(rows) if row.objection],
        left=("placement", "algorithm", "bound by"),
        least_important=(
            *("memory", "samples to target", "compute", "waits", "nodes", "placement", "algorithm", "micro-batch"),
            *("useful", "samples/s", f"cost of {_cost_of(forecast)}", "time to target", "run"),
        ),
    )


def _run_s(forecast: Forecast, row: ForecastRow) -> float | None:
    """Seconds of all the job's epochs, without failures."""
    return None if forecast.run_samples is None else forecast.run_samples / row.samples_per_s


def _cost(forecast: Forecast, row: ForecastRow) -> float | None:
    """To the target, else of all the job's epochs, else of a million samples; None without a price."""
    seconds, price = _run_s(forecast, row), forecast.price_per_device_hour
    if row.cost_to_target is not None or seconds is None or price is None:
        return row.cost_to_target or row.cost_per_million_samples
    return price * row.devices * seconds / 3600


def _cost_of(forecast: Forecast) -> str:
    """What `_cost` is of."""
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
        objections=_objections(forecast),
        one_device=_one_device(forecast),
        rule=RULE,
        charts=_charts(forecast.fastest_of_each_count()),
    )


def _objections(forecast: Forecast) -> list[str]:
    """Which counts cannot run the job, and why."""
    counts: dict[str, list[int]] = {}
    for row in forecast.rows:
        if row.objection:
            counts.setdefault(row.objection, []).append(row.devices)
    return [f"{_ranges(found)}: {sentence}" for sentence, found in counts.items()]


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as "3, 5 to 7"."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]:,}" if len(run) == 1 else f"{run[0]:,} to {run[-1]:,}" for run in runs)


def _one_device(forecast: Forecast) -> str:
    """ "one device", or which of several is meant where the forecast has no row of one."""
    count = forecast.base_devices
    return "one device" if count == 1 else f"one of {formats.devices(count)}"


def _charts(forecast: Forecast) -> list[Chart]:
    """All that have data, in the order of the page: the fastest row of each count."""
    rows, best, first = forecast.rows, forecast.recommended, forecast.rows[0]
    counts = [row.devices for row in rows]
    caption = f"The coloured area is the 90 % prediction interval; the dashed line is {_one_device(forecast)} times n."
    for row in rows:
        most, even = row.micro_batch_size * row.num_micro_batches, row.global_batch_size / row.devices
        if 1.1 < most / even < 2:  # more where devices share a replica
            caption += (
                f" On {formats.devices(row.devices)} the batch cannot be dealt out evenly: the slowest worker computes "
                f"{most:,} of {row.global_batch_size:,} samples, {most / even - 1:.0%} more than the mean."
            )
            break
    throughput = Series(
        "line",
        counts,
        [row.samples_per_s for row in rows],
        "forecast",
        "series-1",
        low=[row.samples_per_s * row.step_s / row.high_s for row in rows],
        high=[row.samples_per_s * row.step_s / row.low_s for row in rows],
        hover="%{x} devices: %{y:.4~g} samples/s",
        size=6 if len(rows) <= _MOST_ROWS else 0,
    )
    text = ("Throughput", "samples/s", caption)
    charts = [beside_ideal(counts, [throughput], first.samples_per_s / first.speedup, best.devices, text)]
    shown = _shown_rows(forecast)
    counts = [row.devices for row in shown]
    colors = ["series-1" if row is best else "series-8" for row in shown]
    with_failures = "Failures, checkpoints and restarts are part of it."
    if best.time_to_target_s is not None:
        hours = [None if row.time_to_target_s is None else row.time_to_target_s / 3600 for row in shown]
        texts = [formats.duration(row.time_to_target_s) for row in shown]
        text = ("Time to the target", "hours", with_failures)
        charts.append(amounts(counts, hours, texts, colors, text))
    if _cost(forecast, best) is not None:
        caption = with_failures if _cost_of(forecast) == "the target" else "Without failures."
        costs = [_cost(forecast, row) for row in shown]
        texts = [_money(forecast, cost) for cost in costs]
        text = (f"Cost of {_cost_of(forecast)}", forecast.currency or "cost", caption)
        charts.append(amounts(counts, costs, texts, colors, text))
    parts = [
        ("compute", "part-compute", [row.compute_s for row in shown]),
        ("waiting for gradients", "part-communication", [row.exposed_s for row in shown]),
        (
            "loader, optimizer, stragglers",
            "part-other",
            [max(0.0, row.step_s - row.compute_s - row.exposed_s) for row in shown],
        ),
    ]
    return fill_the_grid([*charts, step_parts(counts, parts, "Communication that compute hides is not in it.")])
