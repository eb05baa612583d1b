"""The plots of a forecast."""

from __future__ import annotations

from collections.abc import Callable

from paceline.report import formats
from paceline.report.figure import (
    MUTED,
    Figure,
    Plot,
    Trace,
    axis,
    dashed,
    figure,
    fill_the_grid,
    interval,
    line,
    log_axis,
    points,
    series_color,
)
from paceline.report.plan_table import cost_text, run_cost
from paceline.spec.forecast import Forecast, ForecastRow

Value = Callable[[ForecastRow], float | None]
Say = Callable[[float | None], str]

_STEP_PARTS: tuple[tuple[str, str, Callable[[ForecastRow], float]], ...] = (
    ("compute", "compute", lambda row: row.compute_s),
    ("waiting for gradients", "comm", lambda row: row.exposed_s),
    ("loader, optimizer, stragglers", "other", lambda row: max(0.0, row.step_s - row.compute_s - row.exposed_s)),
)
"""(name, colour of the style sheet, seconds) of the parts of a step."""
_MOST_LINEAR = 32
"""Devices beyond which axes are logarithmic."""
_WITH_FAILURES = "Failures, checkpoints and restarts are part of it."


def plan_plots(forecast: Forecast) -> list[Plot]:
    """All plots that have data, in the order of the page; against devices, with the fastest row of each count."""
    forecast = forecast.fastest_of_each_count()
    rows = forecast.rows
    plots = [_step(forecast), _throughput(forecast), _speedup(forecast), _efficiency(forecast)]
    if any(row.time_to_target_s is not None for row in rows):
        plots.append(_total(forecast, "time", "Time to the target", "hours", _hours_to_target, _WITH_FAILURES))
    unit = forecast.currency or "cost"
    if any(row.cost_to_target is not None for row in rows):
        plots.append(
            _total(forecast, "cost", "Cost to the target", unit, lambda row: row.cost_to_target, _WITH_FAILURES)
        )
    elif forecast.run_samples is not None and forecast.price_per_device_hour is not None:
        caption = "All epochs, without failures."
        plots.append(_total(forecast, "cost", "Cost of the run", unit, lambda row: run_cost(forecast, row), caption))
    elif any(row.cost_per_million_samples is not None for row in rows):
        title, caption = "Cost of a million samples", "Without failures."
        plots.append(_total(forecast, "cost", title, unit, lambda row: row.cost_per_million_samples, caption))
    return fill_the_grid(plots)


def _step(forecast: Forecast) -> Plot:
    """Parts of the step on top of each other; in percent over a wide range, where one step would hide all others."""
    rows, best = forecast.rows, forecast.recommended
    unit, norm = ("%", "percent") if is_wide_range(forecast) else ("ms", "")
    data = [
        line(
            [row.devices for row in rows],
            [1e3 * seconds(row) for row in rows],
            f"var(--part-{color})",
            name=name,
            hover="%{x} devices<br>%{y:.3g} " + f"{unit} {name}",
            width=0.5,
            marker={} if len(rows) == 1 else None,
            stackgroup="step",
            groupnorm=norm,
            fillcolor=f"var(--part-{color})",
        )
        for name, color, seconds in _STEP_PARTS
    ]
    return Plot(
        "plan-step",
        "Where the time of a step goes",
        "Communication that compute hides is not in it.",
        f"Milliseconds of a step against devices. On {formats.devices(best.devices)}: "
        f"{formats.duration(best.compute_s)} compute, {formats.duration(best.exposed_s)} waiting for gradients, "
        f"{formats.duration(best.step_s)} in all.",
        figure(data, _devices_axis(forecast), axis(unit, rangemode="tozero"), showlegend=True),
        wide=True,
    )


def _throughput(forecast: Forecast) -> Plot:
    """Samples a second, with the prediction interval and the straight line of one device times n."""
    first = forecast.rows[0]
    caption = f"The coloured area is the 90 % prediction interval; the dashed line is {one_device(forecast)} times n."
    drawn = _against_devices(forecast, lambda row: row.samples_per_s, "samples/s", formats.quantity)
    drawn["data"] = [
        _interval(forecast, lambda row: row.samples_per_s),
        _ideal(forecast, first.samples_per_s / first.speedup),
        *drawn["data"],
    ]
    return Plot(
        "plan-throughput",
        "Throughput",
        caption,
        "Samples a second against devices. " + _in_words(forecast, lambda row: formats.quantity(row.samples_per_s)),
        drawn,
    )


def _speedup(forecast: Forecast) -> Plot:
    drawn = _against_devices(forecast, lambda row: row.speedup, "speed-up", formats.times)
    # The base's own uncertainty cancels in part; what is drawn is that of the row.
    drawn["data"] = [_interval(forecast, lambda row: row.speedup), _ideal(forecast, 1.0), *drawn["data"]]
    uneven = _uneven_rows(forecast)
    if uneven and not is_wide_range(forecast):
        # A trace: an annotation would need other coordinates on logarithmic axes.
        drawn["data"].append(
            {
                "type": "scatter",
                "mode": "text",
                "x": [row.devices for row in uneven],
                "y": [row.speedup for row in uneven],
                "text": ["uneven"] * len(uneven),
                "textposition": "bottom center",
                "hoverinfo": "skip",
                "showlegend": False,
            }
        )
    waits = ""
    if uneven:
        row = uneven[0]
        most, even = row.micro_batch_size * row.num_micro_batches, row.global_batch_size / row.devices
        waits = (
            f" On {formats.devices(row.devices)} the batch cannot be dealt out evenly: the slowest worker computes "
            f"{most:,} of {row.global_batch_size:,} samples, {most / even - 1:.0%} more than the mean; the others wait."
        )
    return Plot(
        "plan-speedup",
        "Speed-up",
        forecast.bend + waits,
        f"Throughput over that of {one_device(forecast)}. "
        + _in_words(forecast, lambda row: formats.times(row.speedup)),
        drawn,
    )


def one_device(forecast: Forecast) -> str:
    """ "one device", or which of several is meant where the forecast has no row of one."""
    count = forecast.base_devices
    return "one device" if count == 1 else f"one device of the smallest row ({count} devices)"


def _uneven_rows(forecast: Forecast) -> list[ForecastRow]:
    """Counts that dip below both of their neighbours because a worker computes more than its share of the batch."""
    return [
        row
        for before, row, after in zip(forecast.rows, forecast.rows[1:], forecast.rows[2:], strict=False)
        if not row.objection
        # A replica computes less than twice the mean; the factor is 2 or more where devices share a replica.
        and 1.1 < row.micro_batch_size * row.num_micro_batches * row.devices / row.global_batch_size < 2
        and row.efficiency < min(before.efficiency, after.efficiency)
    ]


def _efficiency(forecast: Forecast) -> Plot:
    drawn = _against_devices(
        forecast, lambda row: 100 * row.efficiency, "efficiency, %", lambda value: f"{value:.0f} %"
    )
    if any(row.useful_efficiency is not None for row in forecast.rows):
        useful = _line(forecast, _useful_percent, lambda value: f"{value:.0f} % useful", 2)
        drawn["data"].append({**useful, "name": "useful: weighed by the noise scale"})
        drawn["data"][0]["name"] = "throughput"
        drawn["layout"]["showlegend"] = True
    floor = 100 * forecast.efficiency_floor
    ends = [forecast.rows[0].devices, forecast.rows[-1].devices]
    drawn["data"].append(dashed(ends, [floor, floor], "floor", hover=f"the floor: {floor:g} %"))
    drawn["layout"]["yaxis"] = axis("efficiency, %", rangemode="tozero")
    return Plot(
        "plan-efficiency",
        "Scaling efficiency",
        f"Speed-up over devices. Below the dashed floor of {floor:g} % a count is not recommended.",
        "Efficiency against devices. " + _in_words(forecast, lambda row: formats.percent(row.efficiency, 0)),
        drawn,
    )


def _useful_percent(row: ForecastRow) -> float | None:
    return None if row.useful_efficiency is None else 100 * row.useful_efficiency


def _hours_to_target(row: ForecastRow) -> float | None:
    return None if row.time_to_target_s is None else row.time_to_target_s / 3600


def _total(forecast: Forecast, key: str, title: str, unit: str, value: Value, caption: str) -> Plot:
    def say(number: float | None) -> str:
        return cost_text(number, unit)

    return Plot(
        f"plan-{key}",
        title,
        caption,
        f"{title} against devices. " + _in_words(forecast, lambda row: say(value(row))),
        _against_devices(forecast, value, unit, say),
    )


# --- traces and axes ---


def _against_devices(forecast: Forecast, value: Value, title: str, say: Say) -> Figure:
    """One line, and a ring around the recommended row."""
    best = forecast.recommended
    outline = {"color": series_color(1), "width": 3}
    ring = points([best.devices], [value(best)], "rgba(0,0,0,0)", size=15, line=outline)
    ring |= {"name": "recommended", "showlegend": False}
    style = {"type": "log", "nticks": 6} if is_wide_range(forecast) else {"rangemode": "tozero"}
    impossible = [row for row in forecast.rows if row.objection]
    marks = [ring]
    if impossible:
        grey = points([row.devices for row in impossible], [value(row) for row in impossible], MUTED, size=7)
        marks.append(grey | {"name": "cannot run the job", "showlegend": False})
    meta = {"may_be_logarithmic": True}
    return figure([_line(forecast, value, say, 0), *marks], _devices_axis(forecast), axis(title, **style), meta=meta)


def _line(forecast: Forecast, value: Value, say: Say, series: int) -> Trace:
    rows = forecast.rows
    return line(
        [row.devices for row in rows],
        [value(row) for row in rows],
        series_color(series),
        name="forecast",
        marker={"size": 6} if len(rows) <= _MOST_LINEAR else None,
        hover=[
            f"{formats.devices(row.devices)}: {say(value(row))}<br>bound by {row.bound_by}"
            + (f"<br>{row.objection}" if row.objection else "")
            for row in rows
        ],
    )


def _interval(forecast: Forecast, rate: Callable[[ForecastRow], float]) -> Trace:
    """The prediction interval of a quantity that is inverse to the time of a step."""
    rows = forecast.rows
    low, high = ([rate(row) * row.step_s / getattr(row, end) for row in rows] for end in ("high_s", "low_s"))
    return interval([row.devices for row in rows], low, high, series_color(0), name="interval")


def _ideal(forecast: Forecast, per_device: float) -> Trace:
    ends = [forecast.rows[0].devices, forecast.rows[-1].devices]
    return dashed(ends, [per_device * count for count in ends], "ideal")


def is_wide_range(forecast: Forecast) -> bool:
    """Whether axes are logarithmic at first."""
    return forecast.rows[-1].devices > _MOST_LINEAR


def _devices_axis(forecast: Forecast) -> Figure:
    if not is_wide_range(forecast):
        return axis("devices", rangemode="tozero")
    first, last = forecast.rows[0].devices, forecast.rows[-1].devices
    ticks = [1 << power for power in range(last.bit_length()) if first <= 1 << power <= last]
    ticks = ticks[:: -(-len(ticks) // 7)]
    return log_axis("devices", ticks, [f"{tick:,}" for tick in ticks])


def _in_words(forecast: Forecast, say: Callable[[ForecastRow], str]) -> str:
    shown = dict.fromkeys((forecast.recommended, forecast.rows[-1]))
    return "; ".join(f"{formats.devices(row.devices)}: {say(row)}" for row in shown) + "."
