"""What is particular to the two-level sum: its pipeline, and nodes whose workers cannot share memory."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paceline import env
from paceline.comm import WIRE_FORMATS, Links, chunks
from paceline.comm.hierarchical import hierarchical
from paceline.comm.shared_memory import SharedMemory
from paceline.spec import Plan
from paceline.train.process.process_group import join, leave
from tests.kit.workers import run_ranks

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0
Nodes = tuple[tuple[int, ...], ...]
Sums = list[NDArray[np.float64]]

LAYOUTS: list[Nodes] = [
    ((0, 1),),
    ((0,), (1,)),
    ((0,), (1, 2)),
    ((0,), (1,), (2,)),
    ((0, 1, 2), (3,)),
    ((0, 2), (1, 3)),
    ((0, 1), (2,), (3,)),
]
# Around one chunk of 64 bytes, its parts and the pipeline's length.
LENGTHS = [0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 100, 160, 1000]


def _links(nodes: Nodes, share_memory: bool, slot_bytes: int | None = None) -> Links:
    facts = env.worker_facts()
    group = join(facts, Plan(world_size=facts.world_size, timeout_s=TIMEOUT_S)).group
    assert group is not None
    links = Links(group, nodes, torch.device("cpu"), TIMEOUT_S)
    if share_memory:
        return replace(links, shared_memory=SharedMemory.open(group, nodes, TIMEOUT_S, slot_bytes))
    groups = [dist.new_group(list(node), timeout=timedelta(seconds=TIMEOUT_S)) for node in nodes]
    return replace(links, node_group=groups[nodes.index(links.node)])


def _values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * rank + length), dtype=dtype)


def _sums(nodes: Nodes, share_memory: bool, wire: str, dtype: torch.dtype, rounds: int) -> Sums:
    links = replace(_links(nodes, share_memory, slot_bytes=64), wire=WIRE_FORMATS[wire])
    results = []
    with mock.patch.multiple(chunks, MIN_CHUNK_BYTES=64, MAX_CHUNK_BYTES=256):
        for length in LENGTHS * rounds:
            values = _values(links.rank, length, dtype)
            hierarchical(values, links)
            results.append(values.double().numpy())
    dist.barrier()
    leave()
    return results


def _expected(world_size: int, dtype: torch.dtype) -> Sums:
    lengths = [[_values(rank, length, dtype).double() for rank in range(world_size)] for length in LENGTHS]
    return [torch.stack(values).sum(0).numpy() for values in lengths]


def _check(by_rank: list[Sums], expected: Sums, tolerance: float) -> None:
    for results in by_rank:
        for number, (values, first) in enumerate(zip(results, by_rank[0], strict=True)):
            np.testing.assert_allclose(values, expected[number % len(expected)], rtol=tolerance, atol=tolerance)
            np.testing.assert_array_equal(values, first)  # all workers go on with the same bits


@pytest.mark.parametrize("share_memory", [True, False], ids=["shared memory", "node group"])
@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_sums_over_any_nodes_and_lengths(nodes: Nodes, share_memory: bool) -> None:
    world_size = sum(map(len, nodes))
    by_rank = run_ranks(_sums, world_size, nodes, share_memory, "float32", torch.float64, 2)
    _check(by_rank, _expected(world_size, torch.float64), 1e-13)


@pytest.mark.parametrize(("wire", "tolerance"), [("bfloat16", 0.05), ("float16", 0.006)])
def test_workers_agree_to_the_bit_on_what_was_rounded(wire: str, tolerance: float) -> None:
    by_rank = run_ranks(_sums, 3, ((0,), (1, 2)), True, wire, torch.float32, 1)
    _check(by_rank, _expected(3, torch.float32), tolerance)


def test_a_lossy_format_rounds_nothing_inside_a_node() -> None:
    by_rank = run_ranks(_sums, 2, ((0, 1),), True, "bfloat16", torch.float32, 1)
    _check(by_rank, _expected(2, torch.float32), 1e-6)


def test_repeatable_bit_for_bit() -> None:
    nodes = ((0, 1), (2, 3))
    first, again = (run_ranks(_sums, 4, nodes, True, "float32", torch.float32, 1)[0] for _ in range(2))
    for values, repeated in zip(first, again, strict=True):
        np.testing.assert_array_equal(repeated, values)


def _wrong_calls(nodes: Nodes, rounds: int) -> int:
    """Integers, whose sums are exact, in chunks of the size that users get."""
    links = _links(nodes, share_memory=True)
    wrong = 0
    for number in range(rounds):
        length = (number * 7919) % 150_001
        values = torch.arange(length, dtype=torch.float32) + number + links.rank
        hierarchical(values, links)
        ranks = links.world_size * (links.world_size - 1) / 2
        expected = (torch.arange(length, dtype=torch.float32) + number) * links.world_size + ranks
        wrong += not torch.equal(values, expected)
    dist.barrier()
    leave()
    return wrong


def test_hundreds_of_calls_without_a_barrier_between_them() -> None:
    assert run_ranks(_wrong_calls, 3, ((0, 1), (2,)), 300, timeout_s=110) == [0, 0, 0]
