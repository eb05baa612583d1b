"""Numbers as people read them: one place, so that terminal, page and sentences agree."""

from __future__ import annotations

from paceline import words
from paceline.words import number_of, three_digits

NOTHING = "\N{EN DASH}"
"""Stands where there is no number."""


def percent(fraction: float | None, digits: int = 1) -> str:
    """0.978 as "97.8 %"."""
    return NOTHING if fraction is None else f"{100 * fraction:.{digits}f} %"


def points(change: float | None, digits: int = 2) -> str:
    """A difference of two fractions in percentage points: -0.0125 as -1.25, with a true minus sign."""
    return NOTHING if change is None else f"{100 * change:+z.{digits}f}".replace("-", "\N{MINUS SIGN}")


def spread(low: float | None, high: float | None) -> str:
    """The range over seeds, in percent: "97.54 to 97.98" with a dash."""
    return NOTHING if low is None or high is None else f"{100 * low:.2f}\N{EN DASH}{100 * high:.2f}"


def short_percent(fraction: float) -> str:
    """A limit the user chose, without needless zeros: 0.5 as "50 %", 0.0025 as "0.25 %"."""
    return f"{100 * fraction:.4g} %"


def short_points(fraction: float) -> str:
    """A tolerance in words: 0.01 as "1 point", 0.005 as "0.5 points"."""
    number = f"{100 * fraction:.4g}"
    return f"{number} point" if number == "1" else f"{number} points"


def duration(seconds: float | None) -> str:
    """In the fitting unit: "340 ms", "8.1 s", "3 min 20 s", "2 h 05 min"."""
    return NOTHING if seconds is None else words.duration(seconds)


def times(factor: float | None) -> str:
    """A speed-up: 1.786 as "1.79x"."""
    return NOTHING if factor is None else f"{factor:,.2f}x"


def quantity(number: float | None) -> str:
    """A count or rate with thin groups of three: 12345.6 as "12,346", 9.87 as "9.9"."""
    if number is None:
        return NOTHING
    return f"{number:,.0f}" if number >= 100 else three_digits(number, 1)


def devices(count: int) -> str:
    return number_of(count, "device")
