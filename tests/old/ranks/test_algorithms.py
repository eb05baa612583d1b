"""Every algorithm against the backend's own all-reduce, on real workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from paceline import env
from paceline.comm import ALGORITHMS, WIRE_FORMATS, Links
from paceline.comm.shared_memory import SharedMemory
from paceline.spec import AggregationSpec, AlgorithmName, Plan
from paceline.train.process.process_group import join, leave
from tests.kit.workers import run_ranks

Nodes = tuple[tuple[int, ...], ...]
Case = tuple[str, str, int, int, str]
"""Algorithm, wire format, length, number of servers, dtype."""

LAYOUTS: list[Nodes] = [
    ((0,),),
    ((0, 1),),
    ((0,), (1,)),
    ((0, 1), (2,)),
    ((0, 2), (1, 3)),
    ((0, 1, 2), (3,)),
    ((0, 1), (2, 3), (4,)),
]
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}


def _links(nodes: Nodes, timeout_s: float = 30) -> Links:
    """The links of this worker, as if the ranks lived on these nodes."""
    world = join(env.worker_facts(), Plan(world_size=env.worker_facts().world_size, timeout_s=timeout_s))
    if world.group is None:  # one worker has no group of its own in a run, but may ask for one
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    return Links(group, nodes, torch.device("cpu"), timeout_s, SharedMemory.open(group, nodes, timeout_s))


def _values(rank: int, length: int, dtype: str) -> torch.Tensor:
    drawn = torch.randn(length, generator=torch.Generator().manual_seed(1000 * rank + length), dtype=torch.float64)
    return drawn.to(getattr(torch, dtype))


def _sums(nodes: Nodes, cases: list[Case]) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Each case's sum, and the oracle's in float64."""
    links = _links(nodes)
    results = []
    for name, wire, length, num_servers, dtype in cases:
        values = _values(links.rank, length, dtype)
        oracle = values.double()
        dist.all_reduce(oracle)
        ALGORITHMS[name](values, replace(links, wire=WIRE_FORMATS[wire], num_servers=num_servers))
        results.append((values.numpy(), oracle.numpy()))
    leave()
    return results


def _check(nodes: Nodes, cases: list[Case]) -> None:
    world_size = sum(map(len, nodes))
    by_rank = run_ranks(_sums, world_size, nodes, cases, timeout_s=100)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        (first, oracle), *others = results
        scale = max(1.0, float(np.abs(oracle).max(initial=0.0)))
        np.testing.assert_allclose(first, oracle, atol=TOLERANCE[case[1]] * scale * world_size, err_msg=str(case))
        for theirs, _ in others:  # whatever is rounded on the way, all workers go on with the same bits
            np.testing.assert_array_equal(theirs, first, err_msg=str(case))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
@settings(max_examples=3)
@given(data=st.data())
def test_algorithms_sum_like_the_backend(nodes: Nodes, data: st.DataObject) -> None:
    world_size = sum(map(len, nodes))
    case = st.tuples(
        st.sampled_from(sorted(ALGORITHMS)),
        st.just("float32"),
        st.one_of(st.integers(0, 8), st.integers(0, 5000), st.sampled_from([100_003, 300_000])),
        st.integers(1, world_size),
        st.sampled_from(["float32", "float64"]),
    )
    _check(nodes, data.draw(st.lists(case, min_size=40, max_size=60)))


@pytest.mark.parametrize("nodes", [((0, 1),), ((0, 1), (2,))], ids=str)
def test_every_algorithm_in_every_wire_format(nodes: Nodes) -> None:
    exact = [(name, "float32", length, 1, "float32") for name in ALGORITHMS for length in (0, 1, 2, 1000)]
    lossy = [
        (name, wire, length, 2, "float32")
        for name in ALGORITHMS
        if name != "tree_exact"
        for wire in ("bfloat16", "float16")
        for length in (0, 1, 3, 5000)
    ]
    _check(nodes, exact + lossy)


def _back_to_back(name: str, nodes: Nodes, rounds: int) -> float:
    links = _links(nodes)
    worst = 0.0
    for number in range(rounds):
        length = (number * 7919) % 3001 + 1
        values = torch.full((length,), float(number + links.rank))
        ALGORITHMS[name](values, links)
        expected = sum(number + rank for rank in range(links.world_size))
        worst = max(worst, float((values - expected).abs().max()))
    dist.barrier()
    leave()
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_hundreds_of_calls_without_a_barrier_between_them(name: str) -> None:
    nodes = ((0, 1), (2,))
    assert run_ranks(_back_to_back, 3, name, nodes, 300, timeout_s=100) == [0.0, 0.0, 0.0]


def _all_results(nodes: Nodes) -> dict[str, np.ndarray[Any, Any]]:
    links = _links(nodes)
    results = {}
    for name, algorithm in ALGORITHMS.items():
        values = _values(links.rank, 70_001, "float32")
        algorithm(values, links)
        results[name] = values.numpy()
    leave()
    return results


def test_results_are_repeatable_bit_for_bit() -> None:
    first, again = (run_ranks(_all_results, 3, ((0, 1), (2,)))[0] for _ in range(2))
    for name, values in first.items():
        np.testing.assert_array_equal(again[name], values, err_msg=name)


def test_plans_name_exactly_the_algorithms_there_are() -> None:
    assert set(get_args(AlgorithmName)) == {"auto", *ALGORITHMS}
    assert set(get_args(get_type_hints(AggregationSpec)["wire"])) == {*WIRE_FORMATS, "auto-lossy"}
