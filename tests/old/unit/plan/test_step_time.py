"""Computing, overlap, queues, stragglers and what bounds a step."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.buckets import BACKWARD_SHARE, exposed_s, num_buckets, sums_of_exposed_s
from paceline.plan.step_time import (
    bound_by,
    expected_maximum,
    neighbour_slowdown,
    neighbours_factor,
    overlapped_s,
    slowest_s,
    smooth_max,
)

seconds = st.floats(1e-6, 1e4)


@given(seconds, seconds, st.floats(1, 40), st.floats(0, 1))
def test_overlap_lies_between_all_and_none(compute: float, communication: float, exponent: float, tail: float) -> None:
    total = overlapped_s(compute, communication, exponent, tail)
    assert max(compute, communication) * (1 - 1e-9) <= total <= (compute + communication) * (1 + 1e-9)


@given(seconds, seconds)
def test_the_ends_of_overlap_are_exact(one: float, other: float) -> None:
    assert smooth_max(one, other, 1.0) == pytest.approx(one + other)
    assert smooth_max(one, other, math.inf) == max(one, other)
    assert overlapped_s(one, other, math.inf, 1.0) == pytest.approx(one + other)


@given(seconds, seconds, st.floats(1, 20), st.floats(1.01, 2))
def test_a_higher_exponent_hides_more(one: float, other: float, exponent: float, factor: float) -> None:
    assert smooth_max(one, other, exponent * factor) <= smooth_max(one, other, exponent) * (1 + 1e-9)


@given(seconds, st.floats(1e3, 1e9), seconds)
def test_buckets_queue_for_the_link(pass_s: float, size_bytes: float, sums_s: float) -> None:
    """The link takes one at a time, in the order in which they become ready."""
    count = num_buckets(size_bytes)
    end_s = 0.0
    for bucket in range(1, count + 1):
        ready_s = pass_s * (1 - BACKWARD_SHARE * (count - bucket) / count)
        end_s = max(end_s, ready_s) + sums_s / count
    assert exposed_s(pass_s, size_bytes, sums_s) == pytest.approx(end_s - pass_s, rel=1e-6, abs=1e-9)


@given(seconds, st.floats(1e3, 1e9), seconds)
def test_what_is_waited_for_tells_how_long_all_sums_take(pass_s: float, size_bytes: float, waiting_s: float) -> None:
    found_s = sums_of_exposed_s(pass_s, size_bytes, waiting_s)
    assert exposed_s(pass_s, size_bytes, found_s) == pytest.approx(waiting_s, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("n", "published"), [(1, 0), (2, 0.56419), (3, 0.84628), (5, 1.16296), (10, 1.53875), (100, 2.50759)]
)
def test_expected_maximum_is_that_of_the_tables(n: int, published: float) -> None:
    """Harter 1961, "Expected values of normal order statistics", Biometrika 48."""
    assert expected_maximum(n) == pytest.approx(published, abs=1e-5)


def test_expected_maximum_is_that_of_draws() -> None:
    draw = random.Random(0)
    mean = sum(max(draw.gauss(0, 1) for _ in range(16)) for _ in range(4000)) / 4000
    assert expected_maximum(16) == pytest.approx(mean, abs=0.04)


def test_the_slowest_worker_is_that_of_draws() -> None:
    draw = random.Random(0)
    mean_s = sum(max(draw.gauss(2.0, 0.2) for _ in range(16)) for _ in range(4000)) / 4000
    assert slowest_s(2.0, 0.1, expected_maximum(16)) == pytest.approx(mean_s, rel=0.005)


def test_what_bounds_a_step_is_named() -> None:
    assert bound_by(0.1, 0.0, 0.0, 0.0, total=0.1) == "compute"
    assert bound_by(0.1, 0.5, 0.0, 0.0, total=0.5) == "communication"
    assert bound_by(0.1, 0.0, 1.8, 0.0, total=1.8) == "loader"
    assert bound_by(0.01, 0.0, 0.0, 0.1, total=0.11) == "overhead"


def test_who_makes_batches_between_passes_is_bound_by_the_larger_part() -> None:
    assert bound_by(0.1, 0.0, 0.05, 0.0, total=0.15, loads_between_passes=True) == "compute"
    assert bound_by(0.1, 0.0, 0.2, 0.0, total=0.3, loads_between_passes=True) == "loader"


@given(st.floats(1, 10), st.integers(2, 64))
def test_the_slowdown_of_neighbours_explains_what_it_was_measured_on(factor: float, num_on_node: int) -> None:
    assert neighbours_factor(neighbour_slowdown(factor, num_on_node), num_on_node) == pytest.approx(factor)


def test_neighbours_never_help() -> None:
    assert neighbour_slowdown(0.9, 4) == 0.0
    assert neighbour_slowdown(3.0, 1) == 0.0
