"""The laws that the price of a sum obeys, on any layout."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.plan.collectives import COSTS, WIRE_FACTORS, cost_s
from paceline.plan.model import Layout, Network
from paceline.spec import AlgorithmName
from paceline.spec.algorithm import AlphaBeta

SIZE = 1e8
BETA = 1e-9
K = SIZE * BETA

layouts = st.lists(st.integers(1, 9), min_size=1, max_size=9).map(lambda counts: Layout(tuple(counts)))
algorithms = st.sampled_from(sorted(COSTS))


def network(inside: float = 0.0, between: float = BETA, alpha: float = 0.0, per_message: float = 0.0) -> Network:
    return Network(AlphaBeta(alpha, inside), AlphaBeta(alpha, between), per_message)


def one_each(num_nodes: int) -> Layout:
    return Layout((1,) * num_nodes)


def test_every_algorithm_and_wire_format_of_a_run_has_a_price() -> None:
    from paceline.comm import ALGORITHMS, WIRE_FORMATS

    assert set(COSTS) == set(ALGORITHMS)
    assert set(COSTS) == set(get_args(AlgorithmName)) - {"auto"}
    assert set(WIRE_FACTORS) == set(WIRE_FORMATS)


def test_factors_of_wire_formats_are_those_of_their_messages() -> None:
    import torch

    from paceline.comm import WIRE_FORMATS

    values = torch.zeros(1 << 16)
    for name, wire in WIRE_FORMATS.items():
        assert WIRE_FACTORS[name] == wire.encode(values).nbytes / values.nbytes


def test_a_price_needs_no_torch() -> None:
    code = "import sys, paceline.plan.collectives; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@given(st.integers(2, 64))
def test_one_server_moves_2_n_minus_1_copies_and_a_ring_2_n_minus_1_nths(n: int) -> None:
    assert cost_s("parameter_server", SIZE, one_each(n), network()) == pytest.approx(2 * (n - 1) * K)
    assert cost_s("all_to_one", SIZE, one_each(n), network()) == pytest.approx(2 * (n - 1) * K)
    for algorithm in ("ring", "all_reduce", "hierarchical", "tree_exact"):
        assert COSTS[algorithm](SIZE, one_each(n), network()) == pytest.approx(2 * (n - 1) / n * K)


@given(st.integers(2, 64))
def test_a_rounded_all_reduce_has_every_worker_as_a_server(n: int) -> None:
    assert cost_s("all_reduce", SIZE, one_each(n), network(), wire="bfloat16") == pytest.approx((n - 1) / n * K)


@given(st.integers(2, 12), st.integers(2, 8))
def test_two_levels_move_one_gth_of_the_flat_traffic_between_nodes(num_nodes: int, g: int) -> None:
    layout = Layout((g,) * num_nodes)
    flat = cost_s("parameter_server", SIZE, layout, network())
    assert cost_s("parameter_server_two_level", SIZE, layout, network()) == pytest.approx(flat / g)
    # Between nodes they sum as one worker a node would.
    for algorithm in ("hierarchical", "tree_exact"):
        alone = cost_s(algorithm, SIZE, one_each(num_nodes), network())
        assert cost_s(algorithm, SIZE, layout, network()) == pytest.approx(alone)


def bandwidth_bound_s(size_bytes: float, layout: Layout, network: Network) -> float:
    """What no algorithm beats, whatever its latency: for N > 1 nodes 2 (N - 1) / N of the vector over a node's link
    (Patarasuk and Yuan 2009, with a node as one participant); inside a single node the same over a worker's link."""
    n = layout.num_nodes
    level = network.between
    if n == 1:
        n, level = layout.num_workers, network.inside
    return 2 * (n - 1) / n * size_bytes * level.beta_s_per_byte


@given(algorithms, layouts, st.floats(0, 1e-8))
def test_no_algorithm_beats_the_bandwidth_bound(algorithm: AlgorithmName, layout: Layout, inside: float) -> None:
    wires = network(inside=inside)
    bound = bandwidth_bound_s(SIZE, layout, wires)
    assert cost_s(algorithm, SIZE, layout, wires) >= bound * (1 - 1e-9)


@given(algorithms)
def test_one_worker_sends_nothing(algorithm: AlgorithmName) -> None:
    assert cost_s(algorithm, SIZE, Layout((1,)), network(1e-9, 1e-9, 1e-3, 1e-3)) == 0


@given(algorithms, layouts, st.floats(1, 1e9), st.floats(1.01, 10))
def test_more_bytes_slower_links_longer_waits_and_more_overhead_never_cost_less(
    algorithm: AlgorithmName, layout: Layout, size: float, factor: float
) -> None:
    slow = network(1e-10, 1e-9, 1e-5, 1e-6)

    def price(size_bytes: float, wires: Network) -> float:
        return cost_s(algorithm, size_bytes, layout, wires)

    base = price(size, slow) * (1 - 1e-9)
    assert price(size * factor, slow) >= base
    assert price(size, dataclasses.replace(slow, per_message_s=slow.per_message_s * factor)) >= base
    for level in ("inside", "between"):
        link: AlphaBeta = getattr(slow, level)
        for worse in (
            AlphaBeta(link.alpha_s * factor, link.beta_s_per_byte),
            AlphaBeta(link.alpha_s, link.beta_s_per_byte * factor),
        ):
            changed = {"inside": slow.inside, "between": slow.between, level: worse}
            assert price(size, Network(**changed, per_message_s=slow.per_message_s)) >= base


@given(layouts)
def test_a_lossy_format_shrinks_what_travels_but_not_what_stays_in_a_node(layout: Layout) -> None:
    flat: tuple[AlgorithmName, ...] = ("ring", "parameter_server")
    for algorithm in flat:
        whole = cost_s(algorithm, SIZE, layout, network(BETA))
        assert cost_s(algorithm, SIZE, layout, network(BETA), wire="bfloat16") == pytest.approx(whole / 2)
    inside_only = network(inside=BETA, between=0.0)
    kept = cost_s("hierarchical", SIZE, layout, inside_only)
    assert cost_s("hierarchical", SIZE, layout, inside_only, wire="bfloat16") == pytest.approx(kept)
    assert cost_s("tree_exact", SIZE, layout, network(), wire="bfloat16") == cost_s(
        "tree_exact", SIZE, layout, network()
    )


@pytest.mark.parametrize("algorithm", ["hierarchical", "tree_exact"])
def test_two_levels_overlap_by_chunks(algorithm: AlgorithmName) -> None:
    layout = Layout((4, 4))
    inside, between = network(BETA, 0.0), network(0.0, BETA)
    both = cost_s(algorithm, SIZE, layout, network(BETA, BETA))
    one, other = cost_s(algorithm, SIZE, layout, inside), cost_s(algorithm, SIZE, layout, between)
    assert max(one, other) < both < 0.75 * (one + other)


def test_many_nodes_take_trees_instead_of_a_ring_when_latency_rules() -> None:
    wires = network(0.0, BETA, alpha=1e-5)
    layout = one_each(1024)
    assert cost_s("all_reduce", 1e3, layout, wires) == pytest.approx(20 * 1e-5 + 2e3 * BETA)
    assert cost_s("all_reduce", 1e3, layout, wires) < cost_s("ring", 1e3, layout, wires)


def test_what_has_no_price_is_said() -> None:
    with pytest.raises(JobError, match="auto has no cost formula"):
        cost_s("auto", SIZE, one_each(2), network())
    assert cost_s("ring", SIZE, one_each(2), network(), wire="int4") == cost_s("ring", SIZE, one_each(2), network())
