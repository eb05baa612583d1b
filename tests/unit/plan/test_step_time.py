"""Computing, overlap, queues, stragglers and what bounds a step."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.buckets import BACKWARD_SHARE, exposed_s, num_buckets, sums_of_exposed_s
from paceline.plan.model import Layout
from paceline.plan.step_time import (
    ComputeTime,
    StepModel,
    compute_from_flops,
    expected_maximum,
    fit_compute,
    forecast_step,
    neighbour_slowdown,
    neighbours_factor,
    overlapped_s,
    smooth_max,
)

seconds = st.floats(1e-6, 1e4)
ONE, TWO = Layout((1,)), Layout((2,))


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
def test_buckets_queue_for_the_link(compute_s: float, size_bytes: float, sums_s: float) -> None:
    """The link takes one at a time, in the order in which they become ready."""
    count = num_buckets(size_bytes)
    end_s = 0.0
    for bucket in range(1, count + 1):
        ready_s = compute_s * (1 - BACKWARD_SHARE * (count - bucket) / count)
        end_s = max(end_s, ready_s) + sums_s / count
    assert exposed_s(compute_s, size_bytes, sums_s) == pytest.approx(end_s - compute_s, rel=1e-6, abs=1e-9)


@given(seconds, st.floats(1e3, 1e9), seconds)
def test_what_is_waited_for_tells_how_long_all_sums_take(compute_s: float, size_bytes: float, waiting_s: float) -> None:
    found_s = sums_of_exposed_s(compute_s, size_bytes, waiting_s)
    assert exposed_s(compute_s, size_bytes, found_s) == pytest.approx(waiting_s, rel=1e-6, abs=1e-9)


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


@given(st.floats(1e-5, 1), st.floats(1e-6, 1e-2), st.lists(st.integers(1, 4096), min_size=2, max_size=6, unique=True))
def test_a_line_is_found_again(fixed_s: float, per_sample_s: float, sizes: list[int]) -> None:
    fitted = fit_compute(sizes, [fixed_s + per_sample_s * size for size in sizes])
    for size in (1, 100, 5000):
        assert fitted.seconds(size) == pytest.approx(fixed_s + per_sample_s * size, rel=1e-3)


def test_constants_of_computing_are_never_negative() -> None:
    fitted = fit_compute([1, 2, 4], [1.0, 0.9, 0.8])
    assert fitted.fixed_s == pytest.approx(0.89, abs=0.02)
    assert fitted.per_sample_s == 0.0
    steep = fit_compute([1, 2], [1.0, 3.0])
    assert steep.fixed_s == 0.0 and steep.per_sample_s > 0
    alone = fit_compute([8], [2.0])
    assert alone.fixed_s == 0.0
    assert alone.per_sample_s == pytest.approx(0.25)


def test_launching_kernels_is_a_floor() -> None:
    compute = ComputeTime(0.0, 0.001, floor_s=0.02)
    assert compute.seconds(1) == pytest.approx(0.02)
    assert compute.seconds(1000) == pytest.approx(1.0)


def test_without_a_measurement_operations_decide() -> None:
    assert compute_from_flops(3e9, 10e12, efficiency=0.3).seconds(10) == pytest.approx(0.01)


def test_what_bounds_a_step_is_named() -> None:
    model = StepModel(ComputeTime(0.01, 0.001), overlap_exponent=math.inf, tail_fraction=0.0)
    assert forecast_step(model, ONE, 90, 0.0).bound_by == "compute"
    slow_link = forecast_step(model, TWO, 90, 0.5)
    assert (slow_link.bound_by, slow_link.total_s) == ("communication", 0.5)
    assert slow_link.exposed_s == pytest.approx(0.4)
    slow_loader = forecast_step(StepModel(ComputeTime(0.01, 0.001), loader_samples_per_s=100), TWO, 90, 0.0)
    assert slow_loader.bound_by == "loader"
    assert slow_loader.total_s == pytest.approx(1.8)
    assert forecast_step(StepModel(ComputeTime(0.01, 0.0), overhead_s=0.1), ONE, 90, 0.0).bound_by == "overhead"


def test_stragglers_neighbours_and_overhead_add_up() -> None:
    model = StepModel(ComputeTime(0.0, 0.001), straggler_spread=0.1, neighbour_slowdown=0.2, overhead_s=0.01, error=0.1)
    step = forecast_step(model, TWO, 100, 0.0)
    assert step.compute_s == pytest.approx(0.1 * 1.1)
    assert step.total_s == pytest.approx(0.11 * (1 + 0.1 * expected_maximum(2)) + 0.01)
    assert step.total_s == pytest.approx(step.compute_s + step.overhead_s + step.exposed_s)
    assert step.high_s / step.total_s == pytest.approx(math.exp(0.1645)) == step.total_s / step.low_s


def test_only_the_last_micro_step_hides_communication() -> None:
    model = StepModel(ComputeTime(0.0, 0.001), overlap_exponent=math.inf, tail_fraction=0.0)
    assert forecast_step(model, TWO, 100, 0.25, num_micro_steps=4).total_s == pytest.approx(0.3 + 0.25)


def test_who_makes_batches_between_passes_takes_longer_and_is_bound_by_the_larger_part() -> None:
    compute, rate = ComputeTime(0.0, 0.001), 2000.0
    meanwhile = forecast_step(StepModel(compute, loader_samples_per_s=rate), ONE, 100, 0.0)
    between = forecast_step(StepModel(compute, loader_samples_per_s=rate, loads_between_passes=True), ONE, 100, 0.0)
    assert meanwhile.total_s == pytest.approx(0.1)
    assert between.total_s == pytest.approx(0.15)
    assert between.bound_by == "compute"
    slow = StepModel(compute, loader_samples_per_s=rate / 4, loads_between_passes=True)
    assert forecast_step(slow, ONE, 100, 0.0).bound_by == "loader"


@given(st.floats(1, 10), st.integers(2, 64))
def test_the_slowdown_of_neighbours_explains_what_it_was_measured_on(factor: float, num_on_node: int) -> None:
    assert neighbours_factor(neighbour_slowdown(factor, num_on_node), num_on_node) == pytest.approx(factor)


def test_neighbours_never_help() -> None:
    assert neighbour_slowdown(0.9, 4) == 0.0
    assert neighbour_slowdown(3.0, 1) == 0.0
