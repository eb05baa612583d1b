"""The line through timings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.timing import fit_cost

SIZES = [1 << n for n in range(12, 28, 2)]


@given(st.floats(0, 1e-2), st.floats(1e-11, 1e-7))
def test_timings_on_a_line_give_the_line_back(alpha_s: float, beta_s_per_byte: float) -> None:
    cost = fit_cost(SIZES, [alpha_s + n * beta_s_per_byte for n in SIZES])
    for n in SIZES:
        assert cost.seconds(n) == pytest.approx(alpha_s + n * beta_s_per_byte, rel=1e-6)


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=8))
def test_constants_are_never_negative(times_s: list[float]) -> None:
    cost = fit_cost(SIZES[: len(times_s)], times_s)
    assert cost.alpha_s >= 0
    assert cost.beta_s_per_byte >= 0
    assert cost.seconds(SIZES[0]) > 0


def test_one_timing_is_taken_to_be_bandwidth() -> None:
    assert fit_cost([1000], [2.0]).seconds(2000) == pytest.approx(4.0)


@pytest.mark.parametrize("times_s", [[], [0.0], [1.0, -1.0]])
def test_what_cannot_be_a_timing_is_refused(times_s: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        fit_cost(SIZES[: len(times_s)], times_s)
