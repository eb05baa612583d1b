"""Clusters as they might have been probed, and the job that was timed on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import paceline
from paceline.spec import Cluster, Device, Job, Link, Node, StepRow
from paceline.spec.cluster import JobTiming
from paceline.spec.forecast import Forecast

GIB = 2**30


def gpu_cluster(
    num_nodes: int = 2,
    devices_per_node: int = 8,
    *,
    num_parameters: int = 25_000_000,
    fixed_s: float = 4e-3,
    sample_s: float = 1e-3,
    update_s: float = 1e-3,
    sample_bytes: int = 90_000_000,
    link_bytes_per_s: float | None = 12.5e9,
    memory_bytes: int = 80 * GIB,
    **timing: Any,
) -> Cluster:
    """GPUs with NVLink; a pass takes `fixed_s` and `sample_s` a sample. No `link_bytes_per_s`: no step of two nodes."""
    devices = tuple(Device("cuda", index, "A GPU", memory_bytes) for index in range(devices_per_node))
    links = tuple(Link((one.label, other.label), "NV12", 250e9) for one, other in combinations(devices, 2))
    nodes = tuple(
        Node(f"node{place}", 96, 1024 * GIB, "a processor", devices, links=links, is_remote=num_nodes > 1)
        for place in range(num_nodes)
    )
    gradients = 4.0 * num_parameters

    def step(nodes: tuple[int, ...], size: int, num_passes: int = 1) -> StepRow:
        count = sum(nodes)
        pass_s, sum_s = fixed_s + sample_s * size, gradients * 2 * (count - 1) / count / 200e9
        if len(nodes) > 1:
            sum_s += gradients / (link_bytes_per_s or 1.0)
        peak_bytes = 12 * num_parameters + 200_000_000 + sample_bytes * size if count == 1 else None
        step_s = update_s + pass_s
        if count > 1:
            step_s = update_s + max(1.005 * pass_s, sum_s) + 0.05 * min(pass_s, sum_s)
        step_s += (num_passes - 1) * pass_s
        return StepRow(
            nodes, size, num_passes, gradient_bytes=gradients, step_time_s=step_s, peak_memory_bytes=peak_bytes
        )

    layouts: list[tuple[int, ...]] = [(2,), (4,), (8,)] if devices_per_node == 8 else [(devices_per_node,)]
    if num_nodes > 1 and link_bytes_per_s is not None:
        layouts.append((devices_per_node,) * 2)
    alone = (step((1,), 1, 64), step((1,), 16, 16), *(step((1,), size) for size in (1, 16, 64, 256)))
    steps = (*alone, *(step(layout, 64) for layout in layouts))
    return Cluster(nodes, (JobTiming("job", "A GPU", num_parameters, 12, steps, **timing),))


def cpu_cluster(
    num_nodes: int = 1, *, num_parameters: int = 60_000, link_bytes_per_s: float | None = 25e6, **timing: Any
) -> Cluster:
    """Nodes with two cores each; a small model."""
    devices = tuple(Device("cpu", index, "a core", 4 * GIB) for index in range(2))
    nodes = tuple(
        Node(f"node{place}", 2, 8 * GIB, "a processor", devices, is_remote=num_nodes > 1) for place in range(num_nodes)
    )
    gradients = 4.0 * num_parameters
    sums_s: dict[tuple[int, ...], float] = {(1,): 0.0, (2,): 2e-4 + gradients / 2e9}
    if num_nodes > 1 and link_bytes_per_s is not None:
        sums_s[1, 1] = sums_s[2, 2] = 4e-4 + 2 * gradients / link_bytes_per_s
    passes = dict.fromkeys(sums_s, ((8, 4),)) | {(1,): ((8, 8), (4, 16), (64, 1), (256, 1))}
    steps = tuple(
        StepRow(
            layout,
            size,
            num_passes,
            gradient_bytes=gradients,
            step_time_s=2e-4 + num_passes * (2e-3 + 5e-5 * size) + sum_s,
        )
        for layout, sum_s in sums_s.items()
        for size, num_passes in passes[layout]
    )
    return Cluster(nodes, (JobTiming("job", "a processor", num_parameters, 1, steps, **timing),))


def with_nodes(cluster: Cluster, **values: Any) -> Cluster:
    """The cluster with other values of every node."""
    return dataclasses.replace(cluster, nodes=tuple(dataclasses.replace(node, **values) for node in cluster.nodes))


def forecast_of(job: Job, cluster: Cluster, devices: Sequence[int] | str, **request: Any) -> Forecast:
    return paceline.plan(job, cluster=cluster, devices=devices, **request).forecast
