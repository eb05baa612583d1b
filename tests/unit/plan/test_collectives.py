"""What a sum of gradients costs: the formulas of the papers on one link, and laws that hold on any layout of nodes.

K is the time that one copy of the gradients takes on the slowest link, n the number of workers.
"""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.plan.collectives import Network
from tests.unit.plan.calls import ALGORITHMS, sum_s

SIZE, BETA = 1e8, 1e-9
K = SIZE * BETA
SLOW = Network(1e-5, 1e-10, 1e-5, 1e-9)
BETWEEN = Network(between_beta_s_per_byte=BETA)

nodes = st.lists(st.integers(1, 9), min_size=1, max_size=9)
algorithms = st.sampled_from(ALGORITHMS)


@pytest.mark.parametrize("algorithm", ["ring", "all_reduce", "hierarchical", "tree_exact"])
@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 16, 64])
def test_bandwidth_optimal_sums_move_2_n_minus_1_nths(algorithm: str, n: int) -> None:
    """Patarasuk and Yuan 2009; between nodes of one worker, and between workers of one node."""
    assert sum_s(algorithm, SIZE, [1] * n, BETWEEN) == pytest.approx(2 * (n - 1) / n * K)
    assert sum_s(algorithm, SIZE, [n], Network(inside_beta_s_per_byte=BETA)) == pytest.approx(2 * (n - 1) / n * K)


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_a_ring_waits_for_2_n_minus_1_messages(n: int) -> None:
    assert sum_s("ring", 0.0, [1] * n, Network(between_alpha_s=1.0)) == pytest.approx(2 * (n - 1))
    assert sum_s("ring", 0.0, [n], Network(inside_alpha_s=1.0)) == pytest.approx(2 * (n - 1))


@pytest.mark.parametrize(("n", "algorithm"), list(product([2, 3, 8, 64], ["parameter_server", "all_to_one"])))
def test_one_server_receives_and_sends_n_minus_1_copies(n: int, algorithm: str) -> None:
    """Li et al. 2014."""
    assert sum_s(algorithm, SIZE, [1] * n, BETWEEN) == pytest.approx(2 * (n - 1) * K)


@pytest.mark.parametrize(("num_nodes", "g"), list(product([2, 3, 8], [2, 4, 8])))
def test_two_levels_send_between_nodes_as_much_as_one_worker_per_node(num_nodes: int, g: int) -> None:
    for algorithm in ("hierarchical", "tree_exact", "parameter_server_two_level"):
        alone = sum_s(algorithm, SIZE, [1] * num_nodes, BETWEEN)
        assert sum_s(algorithm, SIZE, [g] * num_nodes, BETWEEN) == pytest.approx(alone)
    flat = sum_s("parameter_server", SIZE, [g] * num_nodes, BETWEEN)
    assert sum_s("parameter_server_two_level", SIZE, [g] * num_nodes, BETWEEN) == pytest.approx(flat / g)


@pytest.mark.parametrize("algorithm", ["hierarchical", "tree_exact"])
def test_both_levels_work_at_the_same_time(algorithm: str) -> None:
    both, inside, between = (
        sum_s(algorithm, SIZE, [4, 4], links) for links in (Network(0, BETA, 0, BETA), Network(0, BETA), BETWEEN)
    )
    assert max(inside, between) < both < 0.75 * (inside + between)


def test_many_nodes_sum_in_trees_where_latency_rules() -> None:
    """Sanders, Speck and Traeff 2009: 2 log2(N) messages in place of a ring's 2 (N - 1)."""
    links = Network(between_alpha_s=1e-5, between_beta_s_per_byte=BETA)
    assert sum_s("all_reduce", 1e3, [1] * 1024, links) == pytest.approx(20 * 1e-5 + 2e3 * BETA)
    assert sum_s("all_reduce", SIZE, [1] * 8, links) == pytest.approx(sum_s("ring", SIZE, [1] * 8, links))


@given(algorithms, nodes, st.floats(0, 1e-8))
def test_nothing_beats_the_bandwidth_bound(algorithm: str, layout: list[int], inside_beta: float) -> None:
    n, beta = (len(layout), BETA) if len(layout) > 1 else (layout[0], inside_beta)
    bound = 2 * (n - 1) / n * SIZE * beta
    assert sum_s(algorithm, SIZE, layout, Network(0, inside_beta, 0, BETA)) >= bound * (1 - 1e-9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_worker_sends_nothing(algorithm: str) -> None:
    assert sum_s(algorithm, SIZE, [1], Network(1, 1, 1, 1)) == 0


@given(algorithms, nodes, st.floats(1, 1e9), st.floats(1.01, 10))
def test_more_bytes_and_worse_links_never_cost_less(algorithm: str, layout: list[int], size: float, by: float) -> None:
    base = sum_s(algorithm, size, layout, SLOW) * (1 - 1e-9)
    assert sum_s(algorithm, size * by, layout, SLOW) >= base
    for field in dataclasses.fields(Network):
        worse = dataclasses.replace(SLOW, **{field.name: by * getattr(SLOW, field.name)})
        assert sum_s(algorithm, size, layout, worse) >= base, field.name


@given(st.sampled_from(["ring", "all_reduce", "parameter_server", "tree_exact"]), st.integers(2, 64))
def test_one_more_node_never_makes_a_sum_faster(algorithm: str, num_nodes: int) -> None:
    fewer, more = (sum_s(algorithm, SIZE, [1] * count, BETWEEN) for count in (num_nodes, num_nodes + 1))
    assert fewer <= more * (1 + 1e-9)


def test_an_algorithm_without_a_formula_is_named() -> None:
    with pytest.raises(JobError, match="auto") as caught:
        sum_s("auto", SIZE, [1, 1], BETWEEN)
    assert "ring" in str(caught.value)
