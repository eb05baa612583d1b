"""Charts as plain values, which `chart_script.html` draws with plotly.js in the colours of the page.

A colour is the name of a variable of the style sheet, such as "series-1", which has another value in dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.report import formats

NUM_COLORS = 8
"""Colours of series in the style sheet; further series begin again, told apart by their symbol and dash."""

Kind = Literal["line", "points", "bars", "stacked bars", "reference"]
Values = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """What one colour of a chart shows."""

    kind: Kind
    """"stacked bars" lie on their side, `x` being their names; "reference" is a dashed line to compare others with."""
    x: Sequence[float | str]
    y: Values
    name: str = ""
    """For the legend."""
    color: str | Sequence[str] = "ink"
    """Of all values, or of each."""
    low: Values = ()
    high: Values = ()
    """With `low`: a bar around each of "points", or the area around a "line"."""
    hover: str = ""
    """plotly's template of what is said of a value under the mouse: "%{x} devices: %{y:.3g}"; empty: nothing."""
    text: Sequence[str] = ()
    """Stands at each value, and is %{text} in `hover`."""
    size: float = 6
    """Of markers, in pixels; 0: none."""
    style: int = 0
    """Which symbol and dash."""
    faint: bool = False


@dataclass(frozen=True)
class Axis:
    """One axis; `ticks` are where `labels` stand, and empty where they follow from the values."""

    title: str
    kind: Literal["linear", "log", "category"] = "linear"
    ticks: Sequence[float | str] = ()
    labels: Sequence[str] = ()
    from_zero: bool = False
    suffix: str = ""


@dataclass(frozen=True)
class Chart:
    """One figure of a page."""

    key: str
    title: str
    caption: str
    """What to see in it, in a sentence or two."""
    label: str
    """The same numbers in words, for those who do not see it."""
    series: Sequence[Series]
    x: Axis
    y: Axis
    legend: bool = False
    percent: bool = False
    """Stacked bars show percentages of their sum."""
    wide: bool = False
    """Takes both columns of the page."""


def fill_the_grid(charts: Iterable[Chart | None]) -> list[Chart]:
    """The charts that there are, each widened that would leave a hole beside it in a grid of two columns."""
    filled: list[Chart] = []
    column = 0
    for chart in filter(None, charts):
        if chart.wide and column == 1:
            filled[-1] = replace(filled[-1], wide=True)
        column = 0 if chart.wide else 1 - column
        filled.append(chart)
    if column == 1:
        filled[-1] = replace(filled[-1], wide=True)
    return filled


def series_colors(count: int) -> list[str]:
    return [f"series-{index % NUM_COLORS + 1}" for index in range(count)]


def log_axis(title: str, low: float, high: float, base: int) -> Axis:
    """A logarithmic axis from `low` to `high` with ticks at powers of `base`; in one decade at 1, 2 and 5 too."""
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    digits = (1, 2, 5) if base == 10 and last - first <= 3 else (1,)
    ticks = [digit * float(base) ** power for power in range(first, last + 1) for digit in digits]
    ticks = ticks[:: -(-len(ticks) // 10)]
    return Axis(title, "log", ticks, [f"{tick:,.10g}" for tick in ticks])


def devices_axis(counts: Sequence[int]) -> Axis:
    """Logarithmic where a linear one would crowd the small counts."""
    return log_axis("devices", counts[0], counts[-1], 2) if is_long(counts) else Axis("devices", from_zero=True)


def is_long(counts: Sequence[int]) -> bool:
    """Whether the last of the ascending counts is so much larger that axes are logarithmic."""
    return counts[-1] >= 16 * counts[0]


def in_words(counts: Sequence[int], texts: Iterable[str]) -> str:
    """ "1 device: 3.1 s; 2 devices: 1.6 s."."""
    return "; ".join(f"{formats.devices(count)}: {text}" for count, text in zip(counts, texts, strict=True)) + "."


# --- charts that studies and plans share ---


def beside_ideal(
    counts: Sequence[int], series: Sequence[Series], per_device: float, recommended: int, text: tuple[str, str, str]
) -> Chart:
    """Values that would grow with the devices, the ideal of `per_device` times n, and the recommended count marked.

    Args:
        series: the first has a value for each count.
        text: title, unit and caption.
    """
    title, unit, caption = text
    main = series[0]
    ideal = Series(
        "reference", [counts[0], counts[-1]], [per_device * counts[0], per_device * counts[-1]], "ideal", "muted"
    )
    mark = Series("points", [recommended], [main.y[counts.index(recommended)]], "recommended", "accent", size=14)
    return Chart(
        title.lower().replace(" ", "-"),
        title,
        caption,
        f"{title} ({unit}). " + in_words(counts, [formats.quantity(value) for value in main.y]),
        [ideal, *series, mark],
        devices_axis(counts),
        Axis(unit, "log") if is_long(counts) else Axis(unit, from_zero=True),
        legend=True,
    )


def step_parts(counts: Sequence[int], parts: Sequence[tuple[str, str, Sequence[float]]], caption: str) -> Chart:
    """Where the time of a step goes; in percent for many counts, where one step would hide all others.

    Args:
        parts: name, colour, and seconds for each count.
    """
    names, in_percent = [formats.devices(count) for count in counts], is_long(counts)
    total_s = [sum(held[place] for _, _, held in parts) for place in range(len(counts))]
    unit, unit_s = ("s", 1.0) if max(total_s) >= 1 else ("ms", 1e-3)
    said = [
        f"{formats.duration(parts[0][2][place])} compute of {formats.duration(s)}" for place, s in enumerate(total_s)
    ]
    return Chart(
        "step-time",
        "Where each step's time goes",
        caption,
        "Parts of a step. " + in_words(counts, said),
        [
            Series(
                "stacked bars",
                names,
                [seconds / unit_s for seconds in held],
                name,
                color,
                hover=f"%{{y}}, {name}: %{{text}}",
                text=[formats.duration(seconds) if seconds > 0 else "" for seconds in held],
            )
            for name, color, held in parts
        ],
        Axis("share of a step" if in_percent else f"a step ({unit})", suffix=" %" if in_percent else ""),
        Axis("", "category", names[::-1]),  # the smallest count on top, as in the table
        legend=True,
        percent=in_percent,
        wide=True,
    )


def amounts(
    counts: Sequence[int], values: Values, texts: Sequence[str], colors: Sequence[str], text: tuple[str, str, str]
) -> Chart:
    """A bar for each device count, with its own of `texts` and `colors`. `text`: title, unit and caption."""
    title, unit, caption = text
    names = [f"{count:,}" for count in counts]
    bars = Series("bars", names, values, color=colors, hover="%{x} devices: %{text}", text=texts)
    label = f"{title}. {in_words(counts, texts)}"
    key = title.lower().replace(" ", "-")
    return Chart(key, title, caption, label, [bars], Axis("devices", "category", names), Axis(unit, from_zero=True))
