"""A forecast as a table for the terminal, and the numbers of a row as people read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.report import formats
from paceline.report.tables import table
from paceline.spec.forecast import Forecast, ForecastRow

_FULL_WIDTH = 160
"""Columns of a terminal in which every figure has room."""
_MOST_ROWS = 24
"""Beyond so many, the table leaves counts out; the page and the JSON have them all."""

Column = tuple[str, Callable[[ForecastRow], str]]


def columns(forecast: Forecast) -> list[Column]:
    """Heading and cell of every column that this forecast has figures for."""
    found: list[Column] = [
        ("devices", lambda row: f"{row.devices:,}"),
        ("nodes", lambda row: f"{row.nodes:,}"),
        ("placement", lambda row: row.placement or formats.NOTHING),
        ("algorithm", lambda row: row.algorithm if row.devices > 1 else formats.NOTHING),
        ("micro-batch", micro_batch_text),
        ("step", lambda row: formats.duration(row.step_s)),
        ("compute", lambda row: formats.duration(row.compute_s)),
        ("waits", lambda row: formats.duration(row.exposed_s)),
        ("bound by", lambda row: row.bound_by),
        ("samples/s", lambda row: formats.quantity(row.samples_per_s)),
        ("speed-up", lambda row: formats.times(row.speedup)),
        ("efficiency", lambda row: formats.percent(row.efficiency, 0)),
    ]
    rows = forecast.rows
    if not any(row.placement for row in rows):
        found = [column for column in found if column[0] != "placement"]
    if any(row.useful_efficiency is not None for row in rows):
        found.append(("useful", lambda row: formats.percent(row.useful_efficiency, 0)))
    if any(row.memory_bytes is not None for row in rows):
        found.append(("memory", lambda row: memory_text(row.memory_bytes)))
    if any(row.samples_to_target is not None for row in rows):
        if forecast.grow == "batch":  # else it is one number, which the page's head says
            found.append(("samples to target", lambda row: formats.quantity(row.samples_to_target)))
        found.append(("time to target", lambda row: formats.duration(row.time_to_target_s)))
    if any(row.cost_to_target is not None for row in rows):
        found.append(("cost to target", lambda row: cost_text(row.cost_to_target, forecast.currency)))
    elif forecast.run_samples is None and any(row.cost_per_million_samples is not None for row in rows):
        found.append(("cost / million", lambda row: cost_text(row.cost_per_million_samples, forecast.currency)))
    if rows[0].samples_to_target is None and forecast.run_samples is not None:
        found.append(("run", lambda row: formats.duration(run_s(forecast, row))))
        if forecast.price_per_device_hour is not None:
            found.append(("cost of run", lambda row: cost_text(run_cost(forecast, row), forecast.currency)))
    return found


_LESS_IMPORTANT = (
    *("memory", "samples to target", "compute", "waits", "nodes", "placement", "algorithm", "micro-batch", "useful"),
    *("samples/s", "cost to target", "cost / million", "cost of run", "time to target", "run"),
)
"""Columns to leave out on a narrow terminal, in this order."""


def micro_batch_text(row: ForecastRow) -> str:
    """ "32", or "4 x 32" for several passes a step."""
    size = f"{row.micro_batch_size:,}"
    return size if row.num_micro_batches == 1 else f"{row.num_micro_batches} x {size}"


def memory_text(num_bytes: float | None) -> str:
    return formats.NOTHING if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def run_s(forecast: Forecast, row: ForecastRow) -> float | None:
    """Seconds of all the job's epochs, without failures."""
    return None if forecast.run_samples is None else forecast.run_samples / row.samples_per_s


def run_cost(forecast: Forecast, row: ForecastRow) -> float | None:
    """The price of all the job's epochs."""
    seconds, price = run_s(forecast, row), forecast.price_per_device_hour
    return None if seconds is None or price is None else price * row.devices * seconds / 3600


def cost_text(amount: float | None, currency: str) -> str:
    """ "3.14 EUR", or without the currency where it is not known."""
    if amount is None:
        return formats.NOTHING
    return f"{amount:,.0f} {currency}".rstrip() if amount >= 100 else f"{amount:.2f} {currency}".rstrip()


def shown_rows(forecast: Forecast) -> list[ForecastRow]:
    """The rows to show: all, or if there are many, powers of two, the first, the last and the recommended one."""
    rows = forecast.rows
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    kept = {rows[0].devices, rows[-1].devices, forecast.recommended_devices}
    return [row for row in rows if row.devices in kept or row.devices & (row.devices - 1) == 0]


def plan_table(forecast: Forecast, width: int = _FULL_WIDTH) -> RenderableType:
    """The verdict, the rows with the recommended one marked, where more devices stop paying, and the best meshes."""
    rows = shown_rows(forecast)
    grown = ", batch grows with the devices" if forecast.grow == "batch" else ""
    lines: list[RenderableType] = [
        Text(f"{forecast.job} on {forecast.device} ({forecast.device_kind}){grown}", style="bold"),
        _table(forecast, rows, columns(forecast), width),
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


def _table(forecast: Forecast, rows: Sequence[ForecastRow], cells: Sequence[Column], width: int) -> Table:
    kept = _fitting(rows, cells, width - 2)
    found = table("", *(heading for heading, _ in kept), left=("", "placement", "algorithm", "bound by"), no_wrap=True)
    for row in rows:
        is_chosen = row is forecast.recommended
        style = "bold green" if is_chosen else "dim" if row.objection else ""
        mark = "\N{BLACK RIGHT-POINTING POINTER}" if is_chosen else ""
        found.add_row(mark, *(cell(row) for _, cell in kept), style=style)
    return found


def _fitting(rows: Sequence[ForecastRow], cells: Sequence[Column], width: int) -> list[Column]:
    """As many columns as have room, the most important ones; those that are left out are on the page."""
    kept = list(cells)
    for name in ("", *_LESS_IMPORTANT):
        kept = [column for column in kept if column[0] != name]
        if sum(max(map(len, (heading, *map(cell, rows)))) + 2 for heading, cell in kept) <= width:
            break
    return kept
