from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.report import formats


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (14.1e-6, "14.1 µs"),
        (0.34, "340 ms"),
        (8.07, "8.1 s"),
        (112.4, "112 s"),
        (200.4, "3 min 20 s"),
        (3599.7, "60 min 00 s"),
        (7500.0, "2 h 05 min"),
        (None, formats.NOTHING),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert formats.duration(seconds) == text


@given(st.floats(1e-6, 1e6))
def test_a_duration_is_short(seconds: float) -> None:
    assert len(formats.duration(seconds)) <= 12


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (-0.0125, "\N{MINUS SIGN}1.25"),
        (0.005, "+0.50"),
        (-0.00001, "0.00"),
        (0.0, "0.00"),
        (None, formats.NOTHING),
    ],
)
def test_points(change: float | None, text: str) -> None:
    assert formats.points(change) == text


def test_percent_and_times() -> None:
    assert formats.percent(0.978) == "97.8 %"
    assert formats.percent(0.97777, 2) == "97.78 %"
    assert formats.times(1.7861) == "1.79x"
    assert formats.percent(None) == formats.times(None) == formats.NOTHING


def test_limits_drop_needless_zeros() -> None:
    assert formats.short_percent(0.5) == "50 %"
    assert formats.short_points(0.01) == "1 point"
    assert formats.short_points(0.0025) == "0.25 points"


def test_quantity() -> None:
    assert formats.quantity(12345.6) == "12,346"
    assert formats.quantity(9.87) == "9.9"
    assert formats.quantity(0) == "0"
