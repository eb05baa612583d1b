"""Clusters as they might have been probed, for tests of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from paceline.spec import Cluster, Device, JobTiming, Link, MicroBatchTiming, NetworkLink, Node

GIB = 2**30


def gpu_cluster(
    num_nodes: int = 2,
    devices_per_node: int = 8,
    *,
    job: str = "job",
    num_parameters: int = 25_000_000,
    sample_s: float = 1e-3,
    sample_bytes: int = 90_000_000,
    sizes: Sequence[int] = (1, 4, 16, 64, 256),
    link_bytes_per_s: float | None = 12.5e9,
    memory_bytes: int = 80 * GIB,
    loader_samples_per_s: float | None = 20_000.0,
) -> Cluster:
    """GPUs with NVLink; a pass takes 4 ms and `sample_s` for each sample. No `link_bytes_per_s`: no network probed."""
    devices = tuple(Device("cuda", index, "A GPU", memory_bytes) for index in range(devices_per_node))
    links = tuple(
        Link((one.label, other.label), "NV12", 250e9, 5e-6, "measured") for one, other in combinations(devices, 2)
    )
    nodes = tuple(
        Node(f"node{place}", 96, 1024 * GIB, "a processor", devices, links=links, is_remote=num_nodes > 1)
        for place in range(num_nodes)
    )
    network = tuple(
        NetworkLink((one.hostname, other.hostname), link_bytes_per_s, 15e-6, "eth0")
        for one, other in combinations(nodes, 2)
        if link_bytes_per_s is not None
    )
    timing = JobTiming(
        job=job,
        device="A GPU",
        num_parameters=num_parameters,
        threads_per_worker=12,
        micro_batches=tuple(
            MicroBatchTiming(size, 4e-3 + sample_s * size, 8 * num_parameters + 200_000_000 + sample_bytes * size)
            for size in sizes
        ),
        largest_micro_batch_size=sizes[-1],
        loader_samples_per_s=loader_samples_per_s,
        checkpoint_bytes_per_s=1e9,
    )
    return Cluster(nodes, network, (timing,))


def cpu_cluster(
    num_nodes: int = 1, *, job: str = "job", num_parameters: int = 60_000, link_bytes_per_s: float | None = 25e6
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
    network = tuple(
        NetworkLink((one.hostname, other.hostname), link_bytes_per_s, 200e-6, "eth0")
        for one, other in combinations(nodes, 2)
        if link_bytes_per_s is not None
    )
    timing = JobTiming(
        job=job,
        device="a processor",
        num_parameters=num_parameters,
        threads_per_worker=1,
        micro_batches=tuple(MicroBatchTiming(size, 2e-3 + 5e-5 * size) for size in (1, 8, 64, 256)),
        largest_micro_batch_size=256,
        loader_samples_per_s=400_000.0,
        checkpoint_bytes_per_s=2e8,
    )
    return Cluster(nodes, network, (timing,))
