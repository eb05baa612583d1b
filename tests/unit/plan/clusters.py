"""Clusters as they might have been probed, and the job that was timed on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import paceline
from paceline.spec import Cluster, Device, Job, JobTiming, Link, MicroBatchTiming, NetworkLink, Node
from paceline.spec.forecast import Forecast

GIB = 2**30


def gpu_cluster(
    num_nodes: int = 2,
    devices_per_node: int = 8,
    *,
    num_parameters: int = 25_000_000,
    fixed_s: float = 4e-3,
    sample_s: float = 1e-3,
    sample_bytes: int = 90_000_000,
    link_bytes_per_s: float | None = 12.5e9,
    memory_bytes: int = 80 * GIB,
    **timing: Any,
) -> Cluster:
    """GPUs with NVLink; a pass takes `fixed_s` and `sample_s` a sample. No `link_bytes_per_s`: no network probed."""
    devices = tuple(Device("cuda", index, "A GPU", memory_bytes) for index in range(devices_per_node))
    links = tuple(
        Link((one.label, other.label), "NV12", 250e9, 5e-6, "measured") for one, other in combinations(devices, 2)
    )
    nodes = tuple(
        Node(f"node{place}", 96, 1024 * GIB, "a processor", devices, links=links, is_remote=num_nodes > 1)
        for place in range(num_nodes)
    )
    sizes: Sequence[int] = (1, 4, 16, 64, 256)
    passes = tuple(
        MicroBatchTiming(size, fixed_s + sample_s * size, 8 * num_parameters + 200_000_000 + sample_bytes * size)
        for size in sizes
    )
    known: dict[str, Any] = {
        "largest_micro_batch_size": 256,
        "loader_samples_per_s": 1e6,
        "checkpoint_bytes_per_s": 1e9,
    }
    timed = JobTiming("job", "A GPU", num_parameters, 12, passes, **known | timing)
    return Cluster(nodes, _network(nodes, link_bytes_per_s, 15e-6), (timed,))


def cpu_cluster(
    num_nodes: int = 1, *, num_parameters: int = 60_000, link_bytes_per_s: float | None = 25e6, **timing: Any
) -> Cluster:
    """Nodes with two cores each; a small model."""
    devices = tuple(Device("cpu", index, "a core", 4 * GIB) for index in range(2))
    links = (
        Link(("CPU0", "CPU1"), "SHM", 6e9, 1e-6, "measured"),
        Link(("CPU0", "CPU1"), "TCP", 2e9, 15e-6, "measured"),
    )
    nodes = tuple(
        Node(f"node{place}", 2, 8 * GIB, "a processor", devices, links=links, is_remote=num_nodes > 1)
        for place in range(num_nodes)
    )
    passes = tuple(MicroBatchTiming(size, 2e-3 + 5e-5 * size) for size in (1, 8, 64, 256))
    known: dict[str, Any] = {
        "largest_micro_batch_size": 256,
        "loader_samples_per_s": 4e5,
        "checkpoint_bytes_per_s": 2e8,
    }
    timed = JobTiming("job", "a processor", num_parameters, 1, passes, **known | timing)
    return Cluster(nodes, _network(nodes, link_bytes_per_s, 200e-6), (timed,))


def _network(nodes: Sequence[Node], bytes_per_s: float | None, latency_s: float) -> tuple[NetworkLink, ...]:
    if bytes_per_s is None:
        return ()
    pairs = combinations(nodes, 2)
    return tuple(NetworkLink((one.hostname, other.hostname), bytes_per_s, latency_s, "eth0") for one, other in pairs)


def with_nodes(cluster: Cluster, **values: Any) -> Cluster:
    """The cluster with other values of every node."""
    return dataclasses.replace(cluster, nodes=tuple(dataclasses.replace(node, **values) for node in cluster.nodes))


def forecast_of(job: Job, cluster: Cluster, devices: Sequence[int] | str, **request: Any) -> Forecast:
    return paceline.plan(job, cluster=cluster, devices=devices, **request).forecast
