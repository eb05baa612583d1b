"""cluster.json and the nodes of a plan, written and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ClusterError, JobError
from paceline.spec import (
    Cluster,
    Device,
    JobTiming,
    Link,
    MicroBatchTiming,
    NetworkLink,
    Node,
    NodePlacement,
    Peripheral,
    Plan,
)

GPU = Device(
    "cuda", 1, "NVIDIA A100", 2**36, uuid="GPU-1", pci_bus_id="0000:3b:00.0", numa_node=1, cpus=(4, 5), busy="in use"
)
NODE = Node(
    "gpu1",
    64,
    2**38,
    "EPYC",
    devices=(Device("cuda", 0, "NVIDIA A100", 2**36), GPU),
    peripherals=(Peripheral("nic", "NIC0", "mlx5_0", numa_node=0, bytes_per_s=25e9),),
    links=(Link(("GPU0", "GPU1"), "NV12", 300e9, 2e-6, "measured"), Link(("GPU0", "NIC0"), "PIX")),
    notes=("GPU 2 is in MIG mode.",),
    is_remote=True,
)
CLUSTER = Cluster(
    (NODE, Node("kim@gpu2", 8, 2**34, "Xeon")),
    network=(NetworkLink(("gpu1", "kim@gpu2"), 1.2e9, 5e-5, "ib0"),),
    timings=(JobTiming("digits", "NVIDIA A100", 25_000_000, 8, (MicroBatchTiming(32, 0.01, 2**31),), 64, 1e4),),
)

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
positive = st.floats(0, 1e15)
devices = st.builds(
    Device,
    st.sampled_from(["cpu", "cuda"]),
    st.integers(0, 99),
    texts,
    st.integers(0, 2**50),
    uuid=texts,
    numa_node=st.none() | st.integers(0, 7),
    cpus=st.lists(st.integers(0, 255), max_size=4).map(tuple),
    busy=texts,
)
links = st.builds(
    Link,
    st.tuples(texts, texts),
    texts,
    st.none() | positive,
    st.none() | st.floats(0, 1e6),
    st.sampled_from(["datasheet", "measured"]),
)
nodes = st.builds(
    Node,
    texts,
    st.integers(1, 512),
    st.integers(0, 2**50),
    texts,
    devices=st.lists(devices, max_size=3).map(tuple),
    links=st.lists(links, max_size=3).map(tuple),
    notes=st.lists(texts, max_size=2).map(tuple),
    is_remote=st.booleans(),
)
clusters = st.builds(Cluster, st.lists(nodes, max_size=3).map(tuple))


def test_a_cluster_reads_back_as_saved(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    CLUSTER.save(path)
    assert Cluster.load(path) == CLUSTER
    assert json.loads(path.read_text())["schema"] == 1
    assert list(tmp_path.iterdir()) == [path]  # no draft is left


@given(clusters)
def test_any_cluster_reads_back_as_saved(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    path = tmp_path_factory.getbasetemp() / "cluster.json"
    cluster.save(path)
    assert Cluster.load(path) == cluster


@pytest.mark.parametrize("schema", [0, 2, "1", None, [1]])
def test_another_schema_is_refused(tmp_path: Path, schema: object) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({**CLUSTER.to_mapping(), "schema": schema}))
    with pytest.raises(ClusterError, match="not a cluster file of version 1; write one with paceline probe"):
        Cluster.load(path)


def test_a_file_without_a_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(CLUSTER.to_mapping()))
    with pytest.raises(ClusterError, match="not a cluster file"):
        Cluster.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"cluster"', "null", "\ud800".encode("utf-8", "surrogatepass")])
def test_what_is_no_cluster_is_one_sentence(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "cluster.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"absent\.json cannot be read as a cluster"):
        Cluster.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({}, "'nodes' is missing"),
        ({"nodes": 1}, "nodes = 1 should be a list"),
        ({"nodes": [{"hostname": "a"}]}, r"nodes\[0\].num_cores"),
        ({"nodes": [], "netwerk": []}, "did you mean 'network'"),
    ],
)
def test_a_key_that_cannot_be_meant_is_named(tmp_path: Path, mapping: dict[str, object], words: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"schema": 1, **mapping}))
    with pytest.raises(ClusterError, match=words) as caught:
        Cluster.load(path)
    assert str(path) in str(caught.value)


def test_a_link_is_found_from_both_ends() -> None:
    assert NODE.link("GPU1", "GPU0") == NODE.link("GPU0", "GPU1") == NODE.links[0]
    assert NODE.link("GPU1", "NIC0") is None
    assert [device.label for device in CLUSTER.devices] == ["GPU0", "GPU1"]


def test_cuda_needs_gpus_on_every_node() -> None:
    assert Cluster((NODE,)).device_kind == "cuda"
    assert CLUSTER.device_kind == "cpu"
    assert Node("a", 1, 1, "").device_kind == "cpu"


PLAN = Plan(
    world_size=3,
    device_kind="cuda",
    nodes=(NodePlacement("gpu1", 2, devices=(3, 0), cpus=((0, 1), (2, 3))), NodePlacement("kim@gpu2")),
    threads_per_worker=2,
    algorithm="hierarchical",
    debug_comm=True,
    timeout_s=30.0,
)

shares = st.builds(
    NodePlacement,
    texts,
    st.integers(1, 64),
    st.lists(st.integers(0, 15), max_size=4).map(tuple),
    st.lists(st.lists(st.integers(0, 255), max_size=3).map(tuple), max_size=4).map(tuple),
)


@given(st.lists(shares, max_size=4).map(tuple))
def test_the_nodes_of_a_plan_read_back_from_json(nodes: tuple[NodePlacement, ...]) -> None:
    plan = replace(PLAN, nodes=nodes)
    assert Plan.from_mapping(json.loads(json.dumps(plan.to_mapping()))) == plan


def test_a_plan_without_nodes_has_one_share() -> None:
    assert Plan(world_size=3).placements == (NodePlacement("", 3),)
    assert PLAN.placements == PLAN.nodes
    assert (PLAN.backend, Plan().backend) == ("nccl", "gloo")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": [{"hostname": "a", "workers": 2}]}, r"nodes\[0\].workers"),
        ({"nodes": [{"hostname": "a", "num_workers": 0}]}, r"nodes\[0\].num_workers = 0 should be at least 1"),
        ({"nodes": [{"devices": ["GPU0"]}]}, r"nodes\[0\].devices\[0\] = 'GPU0' should be a whole number"),
        ({"nodes": [{"cpus": [1]}]}, r"nodes\[0\].cpus\[0\] = 1 should be a list"),
        ({"timeout_s": float("inf")}, "timeout_s = inf should be a finite number"),
    ],
)
def test_a_share_that_cannot_be_meant_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(JobError, match=words):
        Plan.from_mapping({**PLAN.to_mapping(), **changes})
