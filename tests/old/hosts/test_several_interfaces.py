"""Nodes with two network interfaces, each in a network of its own: sums use both; one that leads nowhere is named."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.kit.nodes.cluster import Cluster
from tests.old.hosts.forked import fork_on_nodes

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(180)]

NUM_BYTES = 12_000_000
TOLERANCE = 0.07
"""Headers, acknowledgements and barriers beside the payload."""
ALGORITHMS = ("hierarchical", "tree_exact", "ring", "all_reduce")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(num_nodes=2, rate_bits_per_s=200e6, num_links=2) as cluster:
        yield cluster


def _program(names: tuple[str, ...], num_bytes: int = NUM_BYTES) -> list[str]:
    request = {"num_bytes": num_bytes, "calls": [(name, "float32") for name in names], "rounds": 2}
    return ["-m", "tests.old.hosts.summing", json.dumps(request)]


def test_a_sum_between_nodes_is_divided_among_their_interfaces(cluster: Cluster) -> None:
    answer = json.loads(fork_on_nodes(cluster, [2, 2], _program(ALGORITHMS), timeout_s=120)[0].splitlines()[-1])
    for name in ALGORITHMS:
        both, one = answer["results"][f"{name} float32"], answer["results"][f"{name} float32 over one"]
        assert all(call["is_right"] for call in (*both, *one))
        whole = 1.5 if name in ("ring", "all_reduce") else 1.0  # copies of the vector that a node sends
        for call in both:
            assert call["over_each"] == pytest.approx([whole / 2 * NUM_BYTES] * 2, rel=TOLERANCE)
    exact = answer["results"]["tree_exact float32"] + answer["results"]["tree_exact float32 over one"]
    assert len({call["bits"] for call in exact}) == 1


@pytest.mark.parametrize("is_down_here", [True, False])
def test_an_interface_that_leads_nowhere_is_named_at_the_start(cluster: Cluster, is_down_here: bool) -> None:
    if is_down_here:
        cluster.nodes[1].configure("ip", ["link set dev eth1 down"])
        said = "Workers on node1 cannot use the interface eth1"
    else:
        cluster.nodes[1].link_down("eth1")
        said = r"eth1 of node. does not lead to eth1 of node. \(10\.78\.0\..\)"
    with pytest.raises(AssertionError, match=f"LaunchError: {said}.*leave it out of eth0,eth1"):
        fork_on_nodes(cluster, [2, 2], _program(("hierarchical",), 1 << 16), timeout_s=60)
