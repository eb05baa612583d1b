"""The fixed-order tree gives the same bits for any distribution of its leaves over real workers."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from paceline import env
from paceline.comm.tree_exact import TreeSum, tree_all_reduce
from paceline.parallel.assignment import shards_of_rank
from paceline.spec import Plan
from paceline.train.process_group import join, leave
from tests.ranks.harness import run_ranks


def _leaf(leaf: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * leaf + length))


def _sums(cases: list[tuple[int, int]]) -> list[torch.Tensor]:
    facts = env.worker_facts()
    world = join(facts, Plan(world_size=facts.world_size, timeout_s=30))
    results = []
    for num_leaves, length in cases:
        runs = [shards_of_rank(rank, facts.world_size, num_leaves) for rank in range(facts.world_size)]
        first, stop = runs[facts.rank]
        tree = TreeSum(first)
        for leaf in range(first, stop):
            tree.push(_leaf(leaf, length))
        results.append(tree_all_reduce(tree.partials, runs, torch.empty(length), world.group))
    leave()
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_distribution_gives_the_bits_of_one_worker(world_size: int) -> None:
    pick = random.Random(world_size)
    # Fewer leaves than workers, lengths that divide by nothing, an empty vector, a single element.
    cases = [(1, 5), (2, 0), (3, 1), (6, 7), (8, 64)] + [(pick.randint(1, 17), pick.randint(0, 300)) for _ in range(40)]
    (alone,) = run_ranks(_sums, 1, cases)
    for sums in run_ranks(_sums, world_size, cases):
        for ours, expected in zip(sums, alone, strict=True):
            assert torch.equal(ours, expected)


def _back_to_back(rounds: int) -> float:
    facts = env.worker_facts()
    world = join(facts, Plan(world_size=facts.world_size, timeout_s=30))
    runs = [(rank, rank + 1) for rank in range(facts.world_size)]
    worst = 0.0
    for number in range(rounds):
        mine = torch.full((number % 37 + 1,), float(number + facts.rank))
        expected = sum(number + rank for rank in range(facts.world_size))
        total = tree_all_reduce([mine], runs, mine, world.group)
        worst = max(worst, float((total - expected).abs().max()))
    dist.barrier()
    leave()
    return worst


def test_calls_without_a_barrier_between_them_do_not_mix() -> None:
    assert run_ranks(_back_to_back, 3, 300) == [0.0, 0.0, 0.0]
