"""Plots as plain plotly.js figures: the style that all pages share, and the traces that figures are made of.

A colour is written as the name of a CSS variable, "var(--series-1)", optionally with an opacity in percent
behind it, "var(--series-1) 15%"; the page puts in the value that its light or dark scheme gives the name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Figure = dict[str, Any]
"""plotly.js `data` and `layout`."""
Trace = dict[str, Any]
Values = Sequence[float | None]

NUM_SERIES = 8
"""Colours the style sheet defines; further series begin again, told apart by marker and dash."""
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "x")
STEP_PARTS = (
    ("compute", "compute", "compute_s"),
    ("data", "data", "data_s"),
    ("exposed communication", "comm", "exposed_comm_s"),
)
"""(name, colour of the style sheet, attribute of `StepTime`)."""
INK, MUTED, SURFACE = "var(--ink)", "var(--muted)", "var(--surface)"

_AXIS = {
    "color": MUTED,
    "gridcolor": "var(--grid)",
    "linecolor": "var(--axis)",
    "showline": True,
    "zeroline": False,
    "automargin": True,
    "title": {"standoff": 10, "font": {"size": 13, "color": MUTED}},
}
TEMPLATE: dict[str, Any] = {
    "layout": {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK},
        "margin": {"l": 8, "r": 16, "t": 16, "b": 8},
        "showlegend": False,
        # Above the plot, where it wraps on a narrow screen.
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"color": INK}},
        "hoverlabel": {"bgcolor": SURFACE, "bordercolor": "var(--axis)", "font": {"color": INK}},
        "hovermode": "closest",
        "xaxis": {**_AXIS, "showgrid": False},
        "yaxis": _AXIS,
    }
}
"""The plotly template of every figure of every page."""


@dataclass(frozen=True)
class Plot:
    """One figure of a page."""

    key: str
    title: str
    caption: str
    """What to see in it, in a sentence."""
    label: str
    """The same numbers in words, for those who do not see it."""
    figure: Figure
    table: tuple[tuple[str, ...], ...] = ()
    """Values too small to be labelled in the plot, head row and head column first."""
    wide: bool = False
    """Takes both columns."""


def fill_the_grid(plots: Iterable[Plot]) -> list[Plot]:
    """The plots, each widened that would leave a hole beside it in a grid of two columns."""
    filled: list[Plot] = []
    column = 0
    for plot in plots:
        if plot.wide and column == 1:
            filled[-1] = dataclasses.replace(filled[-1], wide=True)
        column = 0 if plot.wide else 1 - column
        filled.append(plot)
    if column == 1:
        filled[-1] = dataclasses.replace(filled[-1], wide=True)
    return filled


def figure(data: Sequence[Trace], xaxis: Figure, yaxis: Figure, **layout: Any) -> Figure:
    """A figure with two axes; `layout` is what it has beyond the template."""
    return {"data": list(data), "layout": {"xaxis": xaxis, "yaxis": yaxis, **layout}}


def axis(title: str, **style: Any) -> Figure:
    return {"title": {"text": title}, **style}


def log_axis(title: str, values: Iterable[float], ticks: Sequence[str] = (), **style: Any) -> Figure:
    """A logarithmic axis with ticks at `values`; `ticks`: what stands there, else the values."""
    shown = list(values)
    return axis(title, type="log", tickvals=shown, ticktext=list(ticks) or [f"{tick:g}" for tick in shown], **style)


def log_ticks(low: float, high: float, most_decades: int) -> list[float]:
    """1, 2, 5 of every decade that the values touch; only 1 where there are more decades than `most_decades`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= most_decades else (1,)
    return [digit * 10.0**power for power in range(first, last + 1) for digit in digits]


def series_color(index: int) -> str:
    return f"var(--series-{index % NUM_SERIES + 1})"


def line(
    x: Sequence[Any],
    y: Values,
    color: str,
    *,
    hover: str | Sequence[str] = "",
    width: float = 2,
    dash: str = "solid",
    marker: Figure | None = None,
    **more: Any,
) -> Trace:
    """A line, with markers on it where `marker` has their size and symbol.

    Args:
        hover: a text for every point, or one template for all; empty: nothing is shown.
    """
    trace = {
        "type": "scatter",
        "mode": "lines" if marker is None else "lines+markers",
        "x": list(x),
        "y": list(y),
        "line": {"color": color, "width": width, "dash": dash},
        **_hover(hover),
    }
    return trace | ({} if marker is None else {"marker": {"color": color, **marker}}) | more


def points(
    x: Sequence[Any], y: Values, color: str, *, size: float, hover: str | Sequence[str] = "", **marker: Any
) -> Trace:
    """Markers alone."""
    style = {"size": size, "color": color, **marker}
    return {"type": "scatter", "mode": "markers", "x": list(x), "y": list(y), "marker": style, **_hover(hover)}


def stacked_bar(
    name: str, color: str, y: Sequence[str], x: Sequence[float], *, hover: str = "%{text}", **more: Any
) -> Trace:
    """A part of horizontal bars, in a colour of parts of a step."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(y),
        "x": list(x),
        "marker": {"color": f"var(--part-{color})", "line": {"color": SURFACE, "width": 1.5}},
        **_hover("%{y}, " + f"{name}: {hover}"),
        **more,
    }


def dashed(x: Sequence[Any], y: Values, name: str, *, color: str = INK, hover: str | Sequence[str] = "") -> Trace:
    """A reference line: an ideal, a floor, a limit."""
    return line(x, y, color, name=name, hover=hover, width=1.5, dash="dash")


def interval(x: Sequence[Any], low: Values, high: Values, color: str, **more: Any) -> Trace:
    """The area between two lines."""
    trace = line([*x, *reversed(x)], [*low, *reversed(high)], color, width=0)
    return trace | {"fill": "toself", "fillcolor": f"{color} 18%", "showlegend": False} | more


def error_bars(
    values: Sequence[float], low: Sequence[float], high: Sequence[float], color: str, **style: Any
) -> Figure:
    """`error_y` of a trace: bars from `low` to `high` around its values."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [end - value for value, end in zip(values, high, strict=True)],
        "arrayminus": [value - end for value, end in zip(values, low, strict=True)],
        "color": color,
        **style,
    }


def horizontal_line(value: float) -> dict[str, Any]:
    """The layout of a dashed line across the plot."""
    shape = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
    return {"shapes": [{**shape, "line": {"color": INK, "width": 1.5, "dash": "dash"}}]}


def _hover(text: str | Sequence[str]) -> dict[str, Any]:
    if not text:
        return {"hoverinfo": "skip"}
    if isinstance(text, str):
        return {"hovertemplate": f"{text}<extra></extra>"}
    return {"hovertext": list(text), "hoverinfo": "text"}
