"""Gradient aggregation between nodes: bytes over each link, and times against each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.nodes.cluster import Cluster
from tests.old.hosts.forked import fork_on_nodes

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(180)]

RATE_BITS_PER_S = 200e6
NUM_BYTES = 12_000_000
TOLERANCE = 0.07
"""Headers, acknowledgements and barriers beside the payload."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(num_nodes=4, rate_bits_per_s=RATE_BITS_PER_S) as cluster:
        yield cluster


def _run(cluster: Cluster, workers: list[int], calls: list[tuple[str, str]], **request: Any) -> dict[str, Any]:
    request = {"num_bytes": NUM_BYTES, "calls": calls, "rounds": 2} | request
    outputs = fork_on_nodes(cluster, workers, ["-m", "tests.old.hosts.summing", json.dumps(request)], timeout_s=120)
    answer: dict[str, Any] = json.loads(outputs[0].strip().splitlines()[-1])
    assert all(one["is_right"] for results in answer["results"].values() for one in results)
    return answer


def _best_s(answer: dict[str, Any], name: str) -> float:
    return float(min(one["seconds"] for one in answer["results"][name]))


def _sent(answer: dict[str, Any], name: str) -> float:
    """Copies of the vector that the busiest node sends."""
    return float(min(one["sent_bytes"] for one in answer["results"][name])) / NUM_BYTES


def test_two_nodes_of_two_workers(cluster: Cluster) -> None:
    calls = [
        ("all_reduce", "float32"),
        ("ring", "float32"),
        ("hierarchical", "float32"),
        ("hierarchical", "bfloat16"),
        ("parameter_server_two_level", "float32"),
    ]
    answer = _run(cluster, [2, 2], calls)
    assert answer["nodes"] == [[0, 1], [2, 3]]
    assert _sent(answer, "all_reduce float32") == pytest.approx(1.5, rel=TOLERANCE)
    assert _sent(answer, "ring float32") == pytest.approx(1.5, rel=TOLERANCE)
    assert _sent(answer, "hierarchical float32") == pytest.approx(1.0, rel=TOLERANCE)
    assert _sent(answer, "hierarchical bfloat16") == pytest.approx(0.5, rel=TOLERANCE)
    assert _sent(answer, "parameter_server_two_level float32") == pytest.approx(1.0, rel=TOLERANCE)
    # Measured on a quiet machine: docs/experiments/allreduce-between-nodes.md; these bounds leave room for a busy one.
    flat_s = _best_s(answer, "all_reduce float32")
    assert _best_s(answer, "hierarchical float32") < 0.9 * flat_s
    assert _best_s(answer, "hierarchical bfloat16") < 0.6 * flat_s


def test_a_ring_that_alternates_between_nodes_costs_twice_as_much(cluster: Cluster) -> None:
    answer = _run(cluster, [2, 2], [("ring", "float32")], rounds=1, alternating=True)
    assert _sent(answer, "ring float32") == pytest.approx(3.0, rel=TOLERANCE)


def test_four_nodes_of_one_worker(cluster: Cluster) -> None:
    names = ["all_reduce", "ring", "hierarchical", "parameter_server", "all_to_one"]
    answer = _run(cluster, [1, 1, 1, 1], [(name, "float32") for name in names], rounds=1)
    for name in ("all_reduce", "ring", "hierarchical"):
        assert _sent(answer, f"{name} float32") == pytest.approx(1.5, rel=TOLERANCE)
    for name in ("parameter_server", "all_to_one"):  # one server answers three workers
        assert _sent(answer, f"{name} float32") == pytest.approx(3.0, rel=TOLERANCE)
    assert _best_s(answer, "all_to_one float32") > 1.3 * _best_s(answer, "ring float32")


def test_uneven_nodes(cluster: Cluster) -> None:
    answer = _run(cluster, [2, 1], [("hierarchical", "float32"), ("hierarchical", "bfloat16")], rounds=1)
    assert _sent(answer, "hierarchical float32") == pytest.approx(1.0, rel=TOLERANCE)
    assert _sent(answer, "hierarchical bfloat16") == pytest.approx(0.5, rel=TOLERANCE)
