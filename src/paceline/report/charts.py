"""Charts as plain values, which `chart_script.html` draws with plotly.js in the colours of the page.

A colour is the name of a variable of the style sheet, such as "series-1", which has another value in dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.report import formats

_NUM_COLORS = 8
"""Colours of series in the style sheet, each with a symbol and a dash of its own; further series begin again."""

Values = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """What one colour of a chart shows."""

    kind: Literal["line", "points", "stacked bars", "reference"]
    """"stacked bars" lie on their side, `x` being their names; "reference" is a dashed line to compare others with."""
    x: Sequence[float | str]
    y: Values
    name: str = ""
    """What the legend calls it."""
    color: str | Sequence[str] = "ink"
    """The colour of all values, or of each."""
    low: Values = ()
    high: Values = ()
    """With `low`: a bar around each of "points", or the area around a "line"."""
    text: Sequence[str] = ()
    """Stands at each value where there is room, and is what the mouse over it shows."""


@dataclass(frozen=True)
class Axis:
    """One axis; `ticks` are empty where they follow from the values."""

    title: str
    kind: Literal["linear", "log", "category"] = "linear"
    ticks: Sequence[float | str] = ()
    from_zero: bool = False
    suffix: str = ""


@dataclass(frozen=True)
class Chart:
    """One figure of a page."""

    title: str
    caption: str
    """What to see in it, in a sentence or two."""
    label: str
    """The same numbers in words, for those who do not see it."""
    series: Sequence[Series]
    x: Axis
    y: Axis


def series_colors(count: int) -> list[str]:
    return [f"series-{index % _NUM_COLORS + 1}" for index in range(count)]


def in_words(counts: Sequence[int], texts: Iterable[str]) -> str:
    """ "1 device: 3.1 s; 2 devices: 1.6 s."."""
    return "; ".join(f"{formats.devices(count)}: {text}" for count, text in zip(counts, texts, strict=True)) + "."


def beside_ideal(values: Series, per_device: float, recommended: int, text: tuple[str, str, str]) -> Chart:
    """Values by ascending device count, the ideal of `per_device` times n, and the recommended count marked.

    Where the last count is much larger than the first, axes are logarithmic: they would crowd the small ones.

    Args:
        text: title, unit and caption.
    """
    (title, unit, caption), counts = text, [int(count) for count in values.x]
    first, last = counts[0], counts[-1]
    ideal = Series("reference", [first, last], [per_device * first, per_device * last], "ideal", "muted")
    mark = Series("points", [recommended], [values.y[counts.index(recommended)]], "recommended", "accent")
    x, y = Axis("devices", from_zero=True), Axis(unit, from_zero=True)
    if last >= 16 * first:
        ticks = [4**power for power in range(last.bit_length()) if first <= 4**power <= last]
        x, y = Axis("devices", "log", ticks), Axis(unit, "log")
    label = f"{title} ({unit}). " + in_words(counts, [formats.quantity(value) for value in values.y])
    return Chart(title, caption, label, [ideal, values, mark], x, y)


def step_parts(counts: Sequence[int], parts: Sequence[tuple[str, str, Sequence[float]]], caption: str) -> Chart:
    """Where the time of a step goes, in percent of it. `parts`: name, colour, and seconds for each count."""
    names = [formats.devices(count) for count in counts]
    series = [
        Series(
            "stacked bars",
            names,
            seconds,
            name,
            color,
            text=[formats.duration(one_s) if one_s > 0 else "" for one_s in seconds],
        )
        for name, color, seconds in parts
    ]
    said = [
        ", ".join(f"{one.name} {text}" for one in series if (text := one.text[place])) for place in range(len(counts))
    ]
    label = "Parts of a step. " + in_words(counts, said)
    y = Axis("", "category", names[::-1])  # the smallest count on top, as in the table
    return Chart("Where each step's time goes", caption, label, series, Axis("share of a step", suffix=" %"), y)
