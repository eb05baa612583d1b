"""The fixed-order tree gives the same bits for any distribution of its leaves over real workers and nodes."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paceline import env
from paceline.comm import Links, chunks
from paceline.comm.fixed_tree import TreeSum
from paceline.comm.links import message_links
from paceline.comm.tree_exact import tree_all_reduce
from paceline.parallel.assignment import shards_of_rank
from paceline.spec import Plan
from paceline.train.process.process_group import join, leave
from tests.kit.workers import run_ranks

CPU = torch.device("cpu")
Nodes = tuple[tuple[int, ...], ...]


def _links(nodes: Nodes | None = None) -> Links | None:
    """Of all workers; as if they were on these nodes."""
    facts = env.worker_facts()
    world = join(facts, Plan(world_size=facts.world_size, timeout_s=30))
    if world.group is None:
        return None
    links = message_links(world.group, CPU, timeout_s=30)
    return links if nodes is None else replace(links, nodes=nodes)


def _leaf(leaf: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * leaf + length))


def _sums(cases: list[tuple[int, int]], nodes: Nodes | None = None) -> list[torch.Tensor]:
    facts, links = env.worker_facts(), _links(nodes)
    results = []
    # A chunk is 16 elements at least, so that several are under way.
    with mock.patch.multiple(chunks, MIN_CHUNK_BYTES=64, MAX_CHUNK_BYTES=256):
        for num_leaves, length in cases:
            runs = [shards_of_rank(rank, facts.world_size, num_leaves) for rank in range(facts.world_size)]
            first, stop = runs[facts.rank]
            tree = TreeSum(first)
            for leaf in range(first, stop):
                tree.push(_leaf(leaf, length))
            results.append(tree_all_reduce(tree.partials, runs, torch.empty(length), links))
    leave()
    return results


def _cases(seed: int) -> list[tuple[int, int]]:
    """Fewer leaves than workers, lengths that divide by nothing, an empty vector, a single element."""
    pick = random.Random(seed)
    fixed = [(1, 5), (2, 0), (3, 1), (6, 7), (8, 64)]
    return fixed + [(pick.randint(1, 17), pick.randint(0, 300)) for _ in range(40)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_distribution_gives_the_bits_of_one_worker(world_size: int) -> None:
    cases = _cases(world_size)
    (alone,) = run_ranks(_sums, 1, cases)
    for sums in run_ranks(_sums, world_size, cases):
        for ours, expected in zip(sums, alone, strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    "nodes",
    [((0,), (1,)), ((0,), (1, 2)), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0,), (1, 2, 3)), ((0,), (1,), (2, 3))],
    ids=str,
)
def test_any_nodes_give_the_bits_of_one_worker(nodes: Nodes) -> None:
    cases = _cases(len(nodes))
    (alone,) = run_ranks(_sums, 1, cases)
    for sums in run_ranks(_sums, sum(map(len, nodes)), cases, nodes):
        for ours, expected in zip(sums, alone, strict=True):
            assert torch.equal(ours, expected)


def _back_to_back(rounds: int) -> float:
    facts, links = env.worker_facts(), _links()
    runs = [(rank, rank + 1) for rank in range(facts.world_size)]
    worst = 0.0
    for number in range(rounds):
        mine = torch.full((number % 37 + 1,), float(number + facts.rank))
        expected = sum(number + rank for rank in range(facts.world_size))
        total = tree_all_reduce([mine], runs, torch.empty_like(mine), links)
        worst = max(worst, float((total - expected).abs().max()))
    dist.barrier()
    leave()
    return worst


def test_calls_without_a_barrier_between_them_do_not_mix() -> None:
    assert run_ranks(_back_to_back, 3, 300) == [0.0, 0.0, 0.0]
