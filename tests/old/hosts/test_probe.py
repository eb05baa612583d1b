"""`paceline probe` and `paceline bench comm` between nodes whose links are known, because they were made so.

Agents and workers are forked from a process that has loaded torch, but for those of `bench comm`.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.report.comm_bench import PAGE_FILE
from paceline.report.comm_page import load_timings
from paceline.spec import Cluster as ClusterFile
from tests.kit.nodes.cluster import INTERFACE, Cluster, Node, NodeProcess
from tests.kit.nodes.sshd import ssh_between
from tests.old.hosts.why_not import why_not_ssh

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not_ssh() is not None, reason=why_not_ssh() or ""),
]

RATE_BYTES_PER_S = 25e6
LEAST_SHARE = 0.6
TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    keys = tmp_path_factory.mktemp("keys")
    with Cluster(num_nodes=3, rate_bits_per_s=8 * RATE_BYTES_PER_S) as cluster, ssh_between(cluster.nodes, keys):
        yield cluster


def _paceline(cluster: Cluster, *arguments: str, cwd: Path) -> NodeProcess:
    """`paceline ARGUMENTS` on the first node, which ends well."""
    process = cluster.nodes[0].exec(
        [sys.executable, "-m", "paceline", *arguments], env={"PACELINE_DEVICE": "cpu"}, cwd=cwd
    )
    assert process.wait(TIMEOUT_S) == 0, process.output
    return process


@dataclass(frozen=True)
class Probed:
    """What `paceline probe` left in its folder, printed, and sent from each node."""

    folder: Path
    stdout: str
    sent_bytes: tuple[int, ...]


@pytest.fixture(scope="module")
def probed(cluster: Cluster, loaded_python: str, tmp_path_factory: pytest.TempPathFactory) -> Probed:
    """The first two nodes; once more where the machine was too busy to send as much as the link can take."""
    for _ in range(4):
        folder = tmp_path_factory.mktemp("probed")
        before = [node.bytes_sent() for node in cluster.nodes]
        options = ("--hosts", "node0:2,node1:2", "--python", loaded_python, "--json")
        process = _paceline(cluster, "probe", *options, cwd=folder)
        sent = (node.bytes_sent() - then for node, then in zip(cluster.nodes, before, strict=True))
        found = Probed(folder, process.stdout, tuple(sent))
        (link,) = ClusterFile.load(folder / "cluster.json").network
        if min(link.bytes_per_s, link.single_stream_bytes_per_s or 0.0) > LEAST_SHARE * RATE_BYTES_PER_S:
            break
    return found


def test_the_network_is_measured_as_it_was_made(probed: Probed) -> None:
    shown = json.loads(probed.stdout.splitlines()[-1])
    loaded = ClusterFile.load(probed.folder / "cluster.json")
    assert [node.hostname for node in loaded.nodes] == ["node0", "node1"]
    assert all(node.is_remote and len(node.devices) == 2 for node in loaded.nodes)

    (link,) = loaded.network
    assert (link.ends, link.interface) == (("node0", "node1"), INTERFACE)
    assert shown["network"][0]["bytes_per_s"] == link.bytes_per_s
    assert link.single_stream_bytes_per_s is not None
    for rate in (link.bytes_per_s, link.single_stream_bytes_per_s):
        assert LEAST_SHARE < rate / RATE_BYTES_PER_S < 1.05, link
    assert 0 < link.latency_s < 1
    # Both ways were measured: each carried three transfers at least, by one stream and by several.
    least_bytes = 2 * 3 * 0.3 * 0.6 * RATE_BYTES_PER_S
    assert min(probed.sent_bytes[:2]) > least_bytes, probed.sent_bytes

    for node in loaded.nodes:
        assert "TCP" in {link.label for link in node.links if link.source == "measured"}
    inside = [one["node"] for one in shown["links"] if one["label"] == "TCP"]
    assert inside == ["node0", "node1"]
    assert list((probed.folder / "runs").iterdir()) == []


def test_what_one_connection_may_not_have_several_get(loaded_python: str, tmp_path: Path) -> None:
    with Cluster(2, rate_bits_per_s=8 * RATE_BYTES_PER_S) as cluster, ssh_between(cluster.nodes, tmp_path):
        for node in cluster.nodes:
            _cap_flows(node, RATE_BYTES_PER_S / 5, tmp_path)
        _paceline(cluster, "probe", "--hosts", "node0:1,node1:1", "--python", loaded_python, "--quiet", cwd=tmp_path)
    (link,) = ClusterFile.load(tmp_path / "cluster.json").network
    assert link.single_stream_bytes_per_s is not None
    assert link.single_stream_bytes_per_s < 1.05 * RATE_BYTES_PER_S / 5
    # Of the four connections some may fall into one class.
    assert link.bytes_per_s > 1.5 * link.single_stream_bytes_per_s, link


def test_interfaces_of_one_speed_are_found_and_measured_together(loaded_python: str, tmp_path: Path) -> None:
    with Cluster(2, 8 * RATE_BYTES_PER_S, num_links=2) as cluster, ssh_between(cluster.nodes, tmp_path):
        _paceline(cluster, "probe", "--hosts", "node0:1,node1:1", "--python", loaded_python, "--quiet", cwd=tmp_path)
    (link,) = ClusterFile.load(tmp_path / "cluster.json").network
    assert link.interface == "eth0,eth1"
    assert link.single_stream_bytes_per_s is not None
    assert link.single_stream_bytes_per_s < 1.05 * RATE_BYTES_PER_S
    assert 0.6 < link.bytes_per_s / (2 * RATE_BYTES_PER_S) < 1.05, link


def _cap_flows(node: Node, bytes_per_s: float, folder: Path) -> None:
    """As clouds do: however fast the link, a connection gets no more. Told apart by four bits of either port.

    The lowest bit would tell nothing: the kernel gives those that connect odd or even ports only.
    """
    rate = f"rate {round(8 * bytes_per_s)}bit quantum 60000"
    commands = [f"qdisc replace dev {INTERFACE} root handle 1: htb"]
    for source, target in itertools.product(range(16), range(16)):
        number = 256 + 16 * source + target
        flow = f"match ip sport {2 * source} 0x1e match ip dport {2 * target} 0x1e match ip protocol 6 0xff"
        commands += [
            f"class add dev {INTERFACE} parent 1: classid 1:{number:x} htb {rate}",
            f"filter add dev {INTERFACE} parent 1: protocol ip u32 {flow} flowid 1:{number:x}",
        ]
    batch = folder / f"{node.hostname}.tc"
    batch.write_text("\n".join(commands) + "\n")
    process = node.exec(["tc", "-batch", str(batch)])
    assert process.wait(20) == 0, process.output


def test_a_third_node_and_a_job_add_to_what_is_known(
    cluster: Cluster, probed: Probed, loaded_python: str, tmp_path: Path
) -> None:
    shutil.copy(probed.folder / "cluster.json", tmp_path)
    first = ClusterFile.load(tmp_path / "cluster.json")
    # The nodes that only look on while two others are timed are not taken for hung.
    hosts = ("--hosts", "node0:1,node1:1,node2:1", "--python", loaded_python, "--hang-timeout", "8")
    job = ("digits-lenet", "--set", "global_batch_size=8", "--budget", "5")
    shown = _paceline(cluster, "probe", *job, *hosts, cwd=tmp_path).stdout
    loaded = ClusterFile.load(tmp_path / "cluster.json")
    assert [node.hostname for node in loaded.nodes] == ["node0", "node1", "node2"]
    assert {link.ends for link in loaded.network} == {("node0", "node1"), ("node0", "node2"), ("node1", "node2")}
    assert loaded.network[0] != first.network[0]
    assert [timing.job for timing in loaded.timings] == ["digits-lenet"]
    assert "not measured: every node: links inside the node: it has one device" in shown


def test_sums_over_nodes_are_timed_and_drawn(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--algorithms", "all_reduce,hierarchical", "--max-bytes", "1M", "--rounds", "2", "--out", "out")
    site = ("--hosts", "node0:1,node1:1", "--interface", INTERFACE)
    process = _paceline(cluster, "bench", "comm", *options, *site, cwd=tmp_path)
    assert (tmp_path / "out" / PAGE_FILE).stat().st_size > 0
    assert process.stdout.splitlines()[-1] == f"out/{PAGE_FILE}"
    timings = load_timings(tmp_path / "out")
    assert timings.nodes == ((0,), (1,))
    # What had to cross the link did, and was counted there.
    largest = [timing for timing in timings.timings if timing.size_bytes == 2**20]
    assert len(largest) == 2
    assert all(timing.link_bytes is not None and timing.link_bytes >= 2**20 for timing in largest), largest
