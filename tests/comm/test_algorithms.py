"""Every algorithm sums a vector over the workers: the sum is right, all workers hold the same bits, and the bytes that
travel are those of the formula, whatever the layout of nodes, the length and the wire format."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm import ALGORITHMS
from paceline.spec.algorithm import automatic_algorithm
from tests.comm.link import MemoryLink, Network, Nodes, nodes_by_name

MESSAGES = ["ring", "parameter_server", "hierarchical", "tree_exact"]
"""The algorithms that send messages of their own; `all_reduce` does so in a lossy wire format only."""
LOSSY = ["all_reduce", "ring", "parameter_server", "hierarchical"]
ROUNDING = 2.0**-8
"""The relative error of a bfloat16, whose significand has 8 bits."""
SINGLE = 2.0**-24

pytestmark = pytest.mark.budget(processor_s=10)  # five times as many examples every night

LAYOUTS = st.lists(st.integers(0, 3), min_size=1, max_size=9).map(nodes_by_name)
LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([1000, 4097]))
SEEDS = st.integers(0, 2**31)


@dataclass(frozen=True)
class Sum:
    """What each worker has after a sum, and the bytes that each sent to each other one."""

    values: list[Tensor]
    sent_bytes: dict[tuple[int, int], int]

    def between_nodes(self, nodes: Nodes) -> int:
        node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
        return sum(size for (sender, to), size in self.sent_bytes.items() if node_of[sender] != node_of[to])

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())


def sum_over(name: str, vectors: Sequence[Tensor], nodes: Nodes, wire: str = "float32", num_servers: int = 1) -> Sum:
    network = Network(len(vectors))

    def work(rank: int) -> Tensor:
        values = vectors[rank].clone()
        ALGORITHMS[name](values, MemoryLink(network, rank, nodes, wire, num_servers).links)
        return values

    return Sum(network.run(work), dict(network.sent_bytes))


def draw_vectors(nodes: Nodes, length: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator, dtype=dtype) for node in nodes for _ in node]


def assert_sum(found: Sum, vectors: Sequence[Tensor], relative_error: float) -> None:
    """All have the same bits, within an error relative to the sum of the magnitudes (Higham 2002, section 4.2)."""
    stacked = torch.stack([vector.double() for vector in vectors])
    error = (found.values[0].double() - stacked.sum(0)).abs()
    assert bool((error <= relative_error * stacked.abs().sum(0)).all())
    for values in found.values:
        assert values.dtype == vectors[0].dtype
        assert torch.equal(values, found.values[0])


@pytest.mark.parametrize(
    ("workers_per_node", "is_gloo", "wire", "algorithm"),
    [
        ([4], True, "bfloat16", "all_reduce"),
        ([1, 1], True, "float32", "all_reduce"),
        ([2, 1], True, "float32", "hierarchical"),
        ([8, 8], False, "float32", "all_reduce"),
        ([8, 8], False, "bfloat16", "hierarchical"),
    ],
)
def test_the_automatic_algorithm_follows_from_the_nodes(
    workers_per_node: list[int], is_gloo: bool, wire: str, algorithm: str
) -> None:
    assert automatic_algorithm(workers_per_node, is_gloo=is_gloo, wire=wire) == algorithm


@pytest.mark.parametrize("name", MESSAGES)
@given(nodes=LAYOUTS, length=LENGTHS, seed=SEEDS, data=st.data())
def test_the_result_is_the_sum_on_every_worker(
    name: str, nodes: Nodes, length: int, seed: int, data: st.DataObject
) -> None:
    vectors = draw_vectors(nodes, length, seed)
    num_servers = data.draw(st.integers(1, len(vectors)))
    found = sum_over(name, vectors, nodes, num_servers=num_servers)
    assert_sum(found, vectors, len(vectors) * SINGLE)


@pytest.mark.parametrize("name", MESSAGES)
@given(nodes=LAYOUTS, seed=SEEDS)
def test_float64_is_summed_in_float64(name: str, nodes: Nodes, seed: int) -> None:
    vectors = draw_vectors(nodes, 11, seed, torch.float64)
    whole = [(vector * 2**15).round() / 2**15 + 2**30 for vector in vectors]  # sums of these are exact
    for values in sum_over(name, whole, nodes).values:
        assert torch.equal(values, torch.stack(whole).sum(0))


@pytest.mark.parametrize("name", [*MESSAGES, "all_reduce"])
@pytest.mark.parametrize("nodes", [((0, 1), (2,)), ((0, 2), (1, 3))], ids=str)
def test_a_vector_of_several_chunks_is_summed(name: str, nodes: Nodes) -> None:
    vectors = [torch.arange(300_001) % 1000 + float(rank) for node in nodes for rank in node]
    wire = "bfloat16" if name == "all_reduce" else "float32"
    found = sum_over(name, vectors, nodes, wire)
    if wire == "float32":
        assert torch.equal(found.values[0], torch.stack(vectors).sum(0))
    assert_sum(found, vectors, 0 if wire == "float32" else 2.01 * ROUNDING)


@pytest.mark.parametrize("name", LOSSY)
@given(nodes=LAYOUTS, length=LENGTHS, seed=SEEDS)
def test_bfloat16_rounds_messages_and_never_the_sum_itself(name: str, nodes: Nodes, length: int, seed: int) -> None:
    """A message is rounded once before and once after the sum; in a ring, at each hop."""
    vectors = draw_vectors(nodes, length, seed)
    roundings = max(2, len(vectors)) if name == "ring" else 2
    assert_sum(sum_over(name, vectors, nodes, "bfloat16"), vectors, 1.01 * roundings * ROUNDING)


@pytest.mark.parametrize("name", ["all_reduce", "parameter_server", "hierarchical"])
def test_sums_are_formed_in_the_dtype_of_the_values(name: str) -> None:
    """Eight numbers that would each vanish beside the first one in bfloat16. (A ring's partial sums are messages.)"""
    vectors = [torch.full((9,), 512.0 if rank == 0 else 1.0) for rank in range(9)]
    nodes = nodes_by_name([0] * 9) if name == "hierarchical" else nodes_by_name(range(9))
    assert all(values.tolist() == [520.0] * 9 for values in sum_over(name, vectors, nodes, "bfloat16").values)


@given(num_workers=st.integers(1, 9), length=LENGTHS, seed=SEEDS)
def test_bfloat16_changes_nothing_inside_a_node_of_hierarchical(num_workers: int, length: int, seed: int) -> None:
    nodes = nodes_by_name([0] * num_workers)
    vectors = draw_vectors(nodes, length, seed)
    assert_sum(sum_over("hierarchical", vectors, nodes, "bfloat16"), vectors, num_workers * SINGLE)


@given(nodes=LAYOUTS, length=LENGTHS, seed=SEEDS)
def test_the_tree_sends_exact_values_in_any_wire_format(nodes: Nodes, length: int, seed: int) -> None:
    vectors = draw_vectors(nodes, length, seed)
    exact, lossy = (sum_over("tree_exact", vectors, nodes, wire).values[0] for wire in ("float32", "bfloat16"))
    assert torch.equal(exact, lossy)


@pytest.mark.parametrize(("name", "wire"), [*((n, "float32") for n in MESSAGES), *((n, "bfloat16") for n in LOSSY)])
def test_a_number_that_is_not_finite_reaches_every_worker(name: str, wire: str) -> None:
    nodes = ((0, 1), (2, 3), (4,))
    for rank, bad in itertools.product(range(5), (torch.nan, torch.inf, -torch.inf)):
        vectors = draw_vectors(nodes, 9, rank)
        vectors[rank][2 * rank] = bad
        for values in sum_over(name, vectors, nodes, wire).values:
            assert values.isfinite().logical_not().nonzero().tolist() == [[2 * rank]]


@pytest.mark.parametrize(("wire", "itemsize"), [("float32", 4), ("bfloat16", 2)])
@given(nodes=LAYOUTS, length=LENGTHS, data=st.data())
def test_bytes_sent_are_those_of_the_formula(
    wire: str, itemsize: int, nodes: Nodes, length: int, data: st.DataObject
) -> None:
    """n workers on m nodes, K bytes: 2 (n - 1) K in all by a ring or by servers, 2 (m - 1) K between nodes by two
    levels; a ring's workers send alike, and a lone server carries half of everything."""
    vectors = draw_vectors(nodes, length, 0)
    num_workers, num_bytes = len(vectors), length * itemsize
    num_servers = data.draw(st.integers(1, num_workers))

    ring = sum_over("ring", vectors, nodes, wire)
    assert ring.total_bytes == 2 * (num_workers - 1) * num_bytes
    for rank in range(num_workers):
        sent = sum(size for (sender, _), size in ring.sent_bytes.items() if sender == rank)
        assert abs(sent - 2 * (num_workers - 1) / num_workers * num_bytes) <= 2 * num_workers * itemsize
        assert sum(sender == rank for sender, _ in ring.sent_bytes) <= 1  # to one neighbour

    servers = sum_over("parameter_server", vectors, nodes, wire, num_servers)
    assert servers.total_bytes == 2 * (num_workers - 1) * num_bytes
    largest = max(
        (
            sum(size for (sender, _), size in servers.sent_bytes.items() if sender == rank)
            for rank in range(num_workers)
        ),
        default=0,
    )
    share = -(-length // num_servers) * itemsize  # of the server with the largest slice
    assert largest <= (num_workers - 1) * share + num_bytes

    assert sum_over("hierarchical", vectors, nodes, wire).between_nodes(nodes) == 2 * (len(nodes) - 1) * num_bytes


@pytest.mark.parametrize(("num_nodes", "workers_per_node"), [(1, 4), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2), (2, 4)])
@given(length=LENGTHS)
@settings(max_examples=10)
def test_the_tree_sends_as_much_between_nodes_as_two_levels(num_nodes: int, workers_per_node: int, length: int) -> None:
    """Where each node holds one block of the tree."""
    nodes = nodes_by_name([node for node in range(num_nodes) for _ in range(workers_per_node)])
    vectors = draw_vectors(nodes, length, 0)
    assert sum_over("tree_exact", vectors, nodes).between_nodes(nodes) == 2 * (num_nodes - 1) * length * 4


@pytest.mark.parametrize("name", MESSAGES)
def test_calls_that_follow_each_other_do_not_mix(name: str) -> None:
    nodes = ((0, 1), (2,))
    network = Network(3)

    def work(rank: int) -> list[Tensor]:
        results = []
        for number in range(50):
            values = torch.full((number * 79 % 97,), float(number + rank))
            ALGORITHMS[name](values, MemoryLink(network, rank, nodes).links)
            results.append(values)
        return results

    for results in network.run(work):
        for number, values in enumerate(results):
            assert torch.equal(values, torch.full_like(values, 3.0 * number + 3))
