"""A forecast as one HTML page that needs nothing but a browser."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from paceline.report import formats
from paceline.report.plan_table import columns, cost_text
from paceline.report.plots import INK, Plot, axis_style, base_layout, series_color
from paceline.report.templates import render
from paceline.spec.forecast import Forecast, ForecastRow

_PARTS = (
    ("compute", "compute"),
    ("exposed", "comm"),
    ("loader and overhead", "other"),
)
"""Parts of a step, and the colours that the style sheet has for them."""
_MANY = 32
"""Devices beyond which axes are logarithmic."""


_WORTH_DRAWING = 0.995
"""Part of the time that lasts, above which failures are no matter."""


def render_plan_page(forecast: Forecast) -> str:
    """The whole page."""
    return render(
        "plan_page.html",
        forecast=forecast,
        best=forecast.recommended,
        cost_text=cost_text,
        columns=columns(forecast),
        has_objections=any(row.objection for row in forecast.rows),
        plots=plan_plots(forecast),
        meaning=_meaning(forecast),
    )


def plan_plots(forecast: Forecast) -> list[Plot]:
    """All plots that have data, in the order of the page."""
    rows = forecast.rows
    plots = [_step(forecast), _throughput(forecast), _speedup(forecast), _efficiency(forecast)]
    if any(row.time_to_target_s is not None for row in rows):
        plots.append(
            _of_rows(forecast, "time", "Time to the target", "hours", lambda row: _hours(row.time_to_target_s))
        )
    if any(row.cost_to_target is not None for row in rows):
        plots.append(_of_rows(forecast, "cost", "Cost to the target", "cost", lambda row: row.cost_to_target))
    elif any(row.cost_per_million_samples is not None for row in rows):
        plots.append(
            _of_rows(forecast, "cost", "Cost of a million samples", "cost", lambda row: row.cost_per_million_samples)
        )
    if len(plots) % 2 == 0:  # the first one is wide: an odd number of others would leave a hole
        plots[-1] = dataclasses.replace(plots[-1], wide=True)
    if any(row.availability < _WORTH_DRAWING for row in forecast.simulated):
        plots.append(_lasting(forecast))
    return plots


def _step(forecast: Forecast) -> Plot:
    """Parts of the step on top of each other; in percent over a wide range, where one step would hide all others."""
    rows = forecast.rows
    is_share = _is_wide_range(forecast)
    values: dict[str, Callable[[ForecastRow], float]] = {
        "compute": lambda row: row.compute_s,
        "exposed": lambda row: row.exposed_s,
        "loader and overhead": lambda row: max(0.0, row.step_s - row.compute_s - row.exposed_s),
    }
    unit = "%" if is_share else "ms"
    names = {"exposed": "waiting for gradients", "loader and overhead": "loader, optimizer, stragglers"}
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": names.get(key, key),
            "stackgroup": "step",
            "groupnorm": "percent" if is_share else "",
            "x": [row.devices for row in rows],
            "y": [1e3 * values[key](row) for row in rows],
            "hovertemplate": "%{x} devices<br>%{y:.3g} " + unit + " " + names.get(key, key) + "<extra></extra>",
            "line": {"width": 0.5, "color": f"var(--part-{color})"},
            "fillcolor": f"var(--part-{color})",
        }
        for key, color in _PARTS
    ]
    if len(rows) == 1:
        data = [{**one, "mode": "lines+markers"} for one in data]
    best = forecast.recommended
    return Plot(
        "plan-step",
        "Where the time of a step goes",
        "Communication that compute hides is not in it.",
        f"Milliseconds of a step against devices. On {formats.devices(best.devices)}: "
        f"{formats.duration(best.compute_s)} compute, {formats.duration(best.exposed_s)} waiting for gradients, "
        f"{formats.duration(best.step_s)} in all.",
        {
            "data": data,
            "layout": base_layout(_devices_axis(forecast), axis_style(unit, rangemode="tozero"), **_legend()),
        },
        wide=True,
    )


def _throughput(forecast: Forecast) -> Plot:
    """With the interval, the straight line that one device promises, and the simulation beside it."""
    rows = forecast.rows
    figure = _curve(forecast, lambda row: row.samples_per_s, "samples/s", formats.quantity)
    figure["data"] = [
        *_band(forecast, lambda row: row.global_batch_size / row.high_s, lambda row: row.global_batch_size / row.low_s),
        _ideal(forecast, rows[0].samples_per_s / rows[0].speedup),
        *figure["data"],
        *_simulated(forecast),
    ]
    return Plot(
        "plan-throughput",
        "Throughput",
        "The band holds a measurement nine times of ten; the dashed line is one device times n."
        + _simulated_caption(forecast),
        "Samples a second against devices. " + _said(forecast, lambda row: formats.quantity(row.samples_per_s)),
        figure,
    )


def _speedup(forecast: Forecast) -> Plot:
    figure = _curve(forecast, lambda row: row.speedup, "speed-up", formats.times)
    # The base's own uncertainty cancels in part; what is drawn is that of the row.
    figure["data"] = [
        *_band(
            forecast,
            lambda row: row.speedup * row.step_s / row.high_s,
            lambda row: row.speedup * row.step_s / row.low_s,
        ),
        _ideal(forecast, 1.0),
        *figure["data"],
    ]
    return Plot(
        "plan-speedup",
        "Speed-up",
        forecast.bend,
        "Throughput over that of one device. " + _said(forecast, lambda row: formats.times(row.speedup)),
        figure,
    )


def _efficiency(forecast: Forecast) -> Plot:
    figure = _curve(forecast, lambda row: 100 * row.efficiency, "efficiency, %", lambda value: f"{value:.0f} %")
    if any(row.useful_efficiency is not None for row in forecast.rows):
        useful = _line(
            forecast,
            lambda row: None if row.useful_efficiency is None else 100 * row.useful_efficiency,
            lambda value: f"{value:.0f} % useful",
            2,
        )
        figure["data"].append({**useful, "name": "useful: weighed by the noise scale"})
        figure["data"][0]["name"] = "throughput"
        figure["layout"] |= _legend()
    floor = 100 * forecast.efficiency_floor
    xs = [forecast.rows[0].devices, forecast.rows[-1].devices]
    figure["data"].append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "floor",
            "x": xs,
            "y": [floor, floor],
            "hovertemplate": f"the floor: {floor:g} %<extra></extra>",
            "line": {"color": INK, "width": 1.5, "dash": "dash"},
        }
    )
    figure["layout"]["yaxis"] |= {"type": "linear", "rangemode": "tozero"}
    return Plot(
        "plan-efficiency",
        "Scaling efficiency",
        f"Speed-up over devices. Below the dashed floor of {floor:g} % a count is not recommended.",
        "Efficiency against devices. " + _said(forecast, lambda row: formats.percent(row.efficiency, 0)),
        figure,
    )


def _of_rows(forecast: Forecast, key: str, title: str, unit: str, value: Callable[[ForecastRow], float | None]) -> Plot:
    def say(number: float | None) -> str:
        return formats.NOTHING if number is None else f"{cost_text(number)} {unit}"

    return Plot(
        f"plan-{key}",
        title,
        "Failures, checkpoints and restarts are part of it.",
        f"{title} against devices. " + _said(forecast, lambda row: say(value(row))),
        _curve(forecast, value, unit, say),
    )


def _lasting(forecast: Forecast) -> Plot:
    """What failures leave of a long run."""
    rows = forecast.simulated
    data = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [row.devices for row in rows],
        "y": [100 * row.availability for row in rows],
        "text": [
            f"{row.devices:,} devices on {row.nodes:,} nodes<br>{100 * row.availability:.1f} % of the time lasts<br>"
            f"a failure every {formats.quantity(row.hours_between_failures)} hours"
            for row in rows
        ],
        "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": series_color(3), "width": 2},
        "marker": {"size": 7, "color": series_color(3)},
    }
    return Plot(
        "plan-lasting",
        "What failures leave",
        "The part of a long run that is work which lasts, with checkpoints at Daly's interval.",
        "Percent of time that lasts. "
        + "; ".join(f"{row.devices:,} devices: {100 * row.availability:.1f} %" for row in rows),
        {"data": [data], "layout": base_layout(_devices_axis(forecast), axis_style("%", range=[0, 102]))},
        wide=True,
    )


# --- pieces of figures ---


def _curve(
    forecast: Forecast, value: Callable[[ForecastRow], float | None], title: str, say: Callable[[Any], str]
) -> dict[str, Any]:
    """One line, and a ring around the recommended row."""
    best = forecast.recommended
    ring = {
        "type": "scatter",
        "mode": "markers",
        "name": "recommended",
        "x": [best.devices],
        "y": [value(best)],
        "hoverinfo": "skip",
        "showlegend": False,
        "marker": {"size": 15, "color": "rgba(0,0,0,0)", "line": {"color": series_color(1), "width": 3}},
    }
    yaxis = (
        axis_style(title, rangemode="tozero")
        if not _is_wide_range(forecast)
        else axis_style(title, type="log", nticks=6)
    )
    layout = base_layout(_devices_axis(forecast), yaxis, hovermode="closest")
    return {"data": [_line(forecast, value, say, 0), ring], "layout": layout}


def _line(
    forecast: Forecast, value: Callable[[ForecastRow], float | None], say: Callable[[Any], str], number: int
) -> dict[str, Any]:
    rows = forecast.rows
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(rows) <= _MANY else "lines",
        "name": "forecast",
        "x": [row.devices for row in rows],
        "y": [value(row) for row in rows],
        "text": [
            f"{formats.devices(row.devices)}: {say(value(row))}<br>bound by {row.bound_by}"
            + (f"<br>{row.objection}" if row.objection else "")
            for row in rows
        ],
        "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": series_color(number), "width": 2},
        "marker": {"size": 6, "color": series_color(number)},
    }


def _band(
    forecast: Forecast, low: Callable[[ForecastRow], float], high: Callable[[ForecastRow], float]
) -> list[dict[str, Any]]:
    rows = forecast.rows
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "interval",
            "x": [row.devices for row in rows] + [row.devices for row in reversed(rows)],
            "y": [low(row) for row in rows] + [high(row) for row in reversed(rows)],
            "fill": "toself",
            "fillcolor": f"{series_color(0)} 18%",
            "line": {"width": 0, "color": series_color(0)},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]


def _ideal(forecast: Forecast, per_device: float) -> dict[str, Any]:
    xs = [forecast.rows[0].devices, forecast.rows[-1].devices]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "ideal",
        "x": xs,
        "y": [per_device * x for x in xs],
        "hoverinfo": "skip",
        "line": {"color": INK, "width": 1.2, "dash": "dash"},
    }


def _simulated(forecast: Forecast) -> list[dict[str, Any]]:
    """Samples/s of the simulation, with nine steps of ten between the ends of a bar."""
    rows = forecast.simulated
    if not rows:
        return []
    batches = {row.devices: row.global_batch_size for row in forecast.rows}
    known = [row for row in rows if row.devices in batches]
    rates = [batches[row.devices] / row.step_s for row in known]
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "simulated",
            "x": [row.devices for row in known],
            "y": rates,
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [batches[row.devices] / row.low_s - rate for row, rate in zip(known, rates, strict=True)],
                "arrayminus": [
                    rate - batches[row.devices] / row.high_s for row, rate in zip(known, rates, strict=True)
                ],
                "color": series_color(1),
                "thickness": 1.5,
            },
            "text": [f"simulated, {row.nodes:,} nodes: {formats.duration(row.step_s)} a step" for row in known],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"size": 8, "color": series_color(1), "symbol": "diamond"},
        }
    ]


def _simulated_caption(forecast: Forecast) -> str:
    return " Diamonds are simulated node by node, with slow nodes and links." if forecast.simulated else ""


def _is_wide_range(forecast: Forecast) -> bool:
    return forecast.rows[-1].devices > _MANY


def _devices_axis(forecast: Forecast) -> dict[str, Any]:
    if not _is_wide_range(forecast):
        return axis_style("devices", rangemode="tozero")
    first, last = forecast.rows[0].devices, forecast.rows[-1].devices
    ticks = [1 << power for power in range(last.bit_length()) if first <= 1 << power <= last]
    ticks = ticks[:: -(-len(ticks) // 7)]
    return axis_style("devices", type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])


def _legend() -> dict[str, Any]:
    """Above the plot, where it wraps on a narrow screen."""
    return {
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"color": INK}},
    }


def _said(forecast: Forecast, say: Callable[[ForecastRow], str]) -> str:
    best, last = forecast.recommended, forecast.rows[-1]
    told = [f"{formats.devices(row.devices)}: {say(row)}" for row in dict.fromkeys((best, last))]
    return "; ".join(told) + "."


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600


def _meaning(forecast: Forecast) -> Sequence[tuple[str, str]]:
    """(term, sentence): what the numbers of this page are, and what they cannot say."""
    terms = [
        (
            "Forecast",
            "Nothing on this page was trained. It follows from what paceline probe measured: passes of the model by "
            "micro-batch, the loader, and the links between devices and nodes.",
        ),
        (
            "Step",
            "Compute, then what compute does not hide of summing gradients, then the optimizer and the wait for the "
            "slowest worker; or the loader, if it takes longer than all of that.",
        ),
        (
            "Interval",
            "Where a measured step is expected nine times of ten. It widens with the part that communication has, and "
            "with every doubling beyond the devices that were measured.",
        ),
        (
            "Speed-up and efficiency",
            "Throughput over that of one device, and the same by device."
            + (
                " The batch of a device stays the same."
                if forecast.grow == "batch"
                else " The global batch stays the same."
            ),
        ),
    ]
    if forecast.noise_scale is not None:
        terms.append(
            (
                "Useful",
                "Efficiency with samples counted for what they are worth: beyond the noise scale of "
                f"{formats.quantity(forecast.noise_scale)} a larger batch brings hardly more (McCandlish et al. 2018). "
                "Against one device with the best batch for it.",
            )
        )
    return terms
