from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from paceline.plan.model import Network
from paceline.plan.reliability import Faults, availability, daly_interval_s, expected_run_s
from paceline.plan.simulate import (
    Jitter,
    Machine,
    Pattern,
    exchange_s,
    simulate_steps,
)
from paceline.spec.algorithm import AlphaBeta
from tests.old.unit.plan.simulated_run import simulate_run

FREE = Network(AlphaBeta(0.0, 0.0), AlphaBeta(0.0, 0.0))
ETHERNET = Network(AlphaBeta(5e-6, 1 / 100e9), AlphaBeta(30e-6, 1 / 3e9), 2e-6)
HOUR_S = 3600.0

sizes: st.SearchStrategy[tuple[int, Pattern]] = st.one_of(
    st.tuples(st.integers(1, 70), st.just("ring")),
    st.tuples(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.just("halving_doubling")),
)
"""Numbers of nodes with what they can do."""


def machine(num_nodes: int, devices_per_node: int = 8, network: Network = ETHERNET) -> Machine:
    return Machine(num_nodes, devices_per_node, network)


@given(sizes, st.integers(1, 8), st.floats(1e3, 1e9))
@settings(max_examples=60, deadline=None)
def test_without_jitter_a_sum_takes_what_its_closed_form_says(
    size: tuple[int, Pattern], devices_per_node: int, gradient_bytes: float
) -> None:
    num_nodes, pattern = size
    there = machine(num_nodes, devices_per_node)
    found = simulate_steps(there, 0.1, gradient_bytes, pattern=pattern, num_buckets=1, num_steps=2)
    assert found.total_s - found.exposed_s == pytest.approx([0.1, 0.1])
    assert found.exposed_s == pytest.approx([exchange_s(there, gradient_bytes, pattern)] * 2)


def test_the_ring_is_the_bandwidth_bound_and_doubling_the_latency_bound() -> None:
    small, large = 1e3, 1e9
    assert exchange_s(machine(1024), small, "halving_doubling") < exchange_s(machine(1024), small) / 20
    # 2 (n - 1) / n of the message over each node's link is the least (Patarasuk and Yuan 2009).
    assert exchange_s(machine(4, 1), large) == pytest.approx(2 * 3 / 4 * large / 3e9, rel=1e-3)


@given(sizes, st.integers(2, 4), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_buckets_hide_and_jitter_costs(size: tuple[int, Pattern], devices: int, seed: int) -> None:
    num_nodes, pattern = size
    there = machine(num_nodes, devices)

    def mean_s(jitter: Jitter, num_buckets: int) -> float:
        found = simulate_steps(there, 0.2, 1e8, jitter=jitter, pattern=pattern, num_buckets=num_buckets, seed=seed)
        return float(found.total_s.mean())

    assert mean_s(Jitter(), 4) < mean_s(Jitter(), 1)
    assert mean_s(Jitter(), 4) <= mean_s(Jitter(slow_fraction=0.5, slow_factor=1.5), 4)
    assert mean_s(Jitter(), 4) >= 0.2


@pytest.mark.parametrize("num_workers", [2, 8, 64, 4096])
def test_waiting_for_the_slowest_agrees_with_the_integral(num_workers: int) -> None:
    """The mean of the maximum of n normal numbers is the integral of x n phi(x) Phi(x)^(n - 1)."""
    exact, _ = quad(lambda x: x * num_workers * norm.pdf(x) * norm.cdf(x) ** (num_workers - 1), -8, 12, limit=200)
    devices = min(num_workers, 8)
    there = machine(num_workers // devices, devices, FREE)
    jitter = Jitter(compute_spread=0.05)
    found = simulate_steps(
        there, 1.0, 0.0, jitter=jitter, pattern="halving_doubling", num_buckets=1, num_steps=1000, seed=1
    )
    assert found.total_s.mean() - 1 == pytest.approx(0.05 * exact, rel=0.05)


def test_one_slow_node_holds_everybody() -> None:
    jitter = Jitter(slow_fraction=1 / 64, slow_factor=1.3)
    found = simulate_steps(machine(64, network=FREE), 1.0, 0.0, jitter=jitter)
    assert found.total_s == pytest.approx([1.3] * 16)


def test_one_slow_link_holds_the_ring() -> None:
    slowed = simulate_steps(machine(32), 0.1, 1e9, jitter=Jitter(link_spread=0.3), num_steps=8)
    assert slowed.total_s.min() > simulate_steps(machine(32), 0.1, 1e9).total_s.max()


def test_a_seed_gives_the_same_result_and_another_one_another() -> None:
    jitter = Jitter(0.05, 0.1, 1.2, 0.1)
    one, same, other = (simulate_steps(machine(9), 0.1, 1e8, jitter=jitter, seed=s).total_s for s in (3, 3, 4))
    assert (one == same).all()
    assert (one != other).all()


def test_the_daly_interval_is_the_best() -> None:
    for checkpoint_s in (10.0, 300.0, 1800.0):
        best = minimize_scalar(
            lambda tau, delta=checkpoint_s: expected_run_s(1.0, tau, Faults(24 * HOUR_S, delta, 600.0), 1),
            bounds=(60, 24 * HOUR_S),
            method="bounded",
        )
        assert daly_interval_s(checkpoint_s, 24 * HOUR_S) == pytest.approx(best.x, rel=5e-3)
    assert daly_interval_s(3.0, 1.0) == 1.0


@pytest.mark.parametrize(
    ("num_nodes", "checkpoint_s", "restart_s"), [(1, 30.0, 60.0), (64, 30.0, 120.0), (512, 20.0, 300.0)]
)
def test_failures_cost_what_daly_says(num_nodes: int, checkpoint_s: float, restart_s: float) -> None:
    faults = Faults(1000 * HOUR_S, checkpoint_s, restart_s)
    interval_s = daly_interval_s(checkpoint_s, faults.mtbf_s(num_nodes))
    num_steps = int(150 * faults.mtbf_s(num_nodes))
    outcomes = [simulate_run(np.array([1.0]), num_steps, num_nodes, faults, interval_s, seed=seed) for seed in range(3)]
    expected_s = expected_run_s(num_steps, interval_s, faults, num_nodes)
    assert np.mean([outcome.total_s for outcome in outcomes]) == pytest.approx(expected_s, rel=0.02)
    for outcome in outcomes:
        parts = outcome.work_s + outcome.checkpoint_s + outcome.lost_s + outcome.restart_s
        assert parts == pytest.approx(outcome.total_s)
        assert outcome.work_s == num_steps
        assert outcome.num_failures == pytest.approx(150, rel=0.3)


def test_the_daly_interval_beats_others_in_the_simulation_too() -> None:
    faults = Faults(1000 * HOUR_S, 60.0, 120.0)
    best_s = daly_interval_s(60.0, faults.mtbf_s(256))

    def total_s(interval_s: float) -> float:
        return simulate_run(np.array([2.0]), 1_000_000, 256, faults, interval_s, seed=2).total_s

    assert total_s(best_s) < min(total_s(best_s / 4), total_s(best_s * 4))


def test_many_steps_are_drawn_as_one_number_without_a_change() -> None:
    steps_s = np.array([0.9, 1.0, 1.4])
    outcome = simulate_run(steps_s, 100_000, 1, Faults(math.inf, 0.0, 0.0), 5000.0)
    assert outcome.total_s == pytest.approx(100_000 * steps_s.mean(), rel=2e-3)
    assert outcome.num_failures == 0


def test_a_machine_that_always_fails_never_ends() -> None:
    faults = Faults(HOUR_S, 600.0, 600.0)
    assert simulate_run(np.array([1.0]), 1000, 4096, faults, 100.0).total_s == math.inf
    assert availability(faults, 4096) < 1e-6


@given(st.integers(1, 4096), st.floats(1e5, 1e9), st.floats(0.1, 600), st.floats(0, 600))
def test_availability_is_a_part_and_falls_with_nodes(
    num_nodes: int, mtbf_s: float, checkpoint_s: float, restart_s: float
) -> None:
    faults = Faults(mtbf_s, checkpoint_s, restart_s)
    one, other = availability(faults, num_nodes), availability(faults, num_nodes + 1)
    assert 0 <= other <= one <= 1


def test_without_failures_everything_is_work() -> None:
    assert availability(Faults(math.inf, 60.0, 60.0), 4096) == 1.0


def test_4096_devices_are_simulated_at_once() -> None:
    began = time.process_time()
    steps = simulate_steps(machine(512), 0.3, 4e8, jitter=Jitter(0.03, 0.01, 1.1, 0.1))
    simulate_run(steps.total_s, 1_000_000, 512, Faults(6000 * HOUR_S, 30.0, 300.0), 2000.0)
    assert time.process_time() - began < 2.0  # 0.2 s, however many others compute
