"""Costs of the links inside of nodes and between them, from what is known of a cluster."""

from __future__ import annotations

from functools import lru_cache

from paceline.errors import ClusterError
from paceline.plan.pick import pick
from paceline.spec import Cluster, DeviceKind, Link, Node
from paceline.spec.algorithm import AlphaBeta

SHARED_MEMORY = "SHM"
"""The probe's label of shared memory between CPU workers of a node; only two-level sums use it."""

BETWEEN_ALPHA_S = 30e-6
"""Assumed latency of a link between nodes if only its rate is given."""
INSIDE_ALPHA_S: dict[DeviceKind, float] = {"cuda": 5e-6, "cpu": 20e-6}
"""Assumed latency of a link inside a node that was not measured."""
PER_MESSAGE_S: dict[DeviceKind, float] = {"cuda": 3e-6, "cpu": 20e-6}
"""Software overhead of NCCL and Gloo per message."""


def between_link(cluster: Cluster, given_bytes_per_s: float | None) -> AlphaBeta | None:
    """The worst link between nodes that was measured, else what the user gives; None: neither is there."""
    if cluster.network:
        rate = min(link.bytes_per_s for link in cluster.network)
        return AlphaBeta(max(link.latency_s for link in cluster.network), 1 / rate)
    return None if given_bytes_per_s is None else AlphaBeta(BETWEEN_ALPHA_S, 1 / given_bytes_per_s)


@lru_cache(maxsize=64)
def inside_link(node: Node, num_devices: int, label: str | None = None) -> AlphaBeta:
    """The slowest link of the best ring of so many devices; on CPU the link with that label, else the loopback.

    Raises:
        ClusterError: the bandwidth between the node's devices is unknown.
    """
    if num_devices == 1:
        return AlphaBeta(0.0, 0.0)
    labels = {device.label for device in node.devices}
    links = [link for link in node.links if labels.issuperset(link.ends) and link.bytes_per_s]
    if node.device_kind == "cpu":
        asked = [link for link in links if link.label == label]
        links = asked or [link for link in links if link.label != SHARED_MEMORY] or links
    slowest: Link | None = min(links, key=lambda link: link.bytes_per_s or 0.0, default=None)
    if node.device_kind == "cuda" and num_devices <= len(node.devices):
        slowest = pick(node, num_devices).ring.bottleneck or slowest
    if slowest is None or not slowest.bytes_per_s:
        where = node.hostname or "the node"
        raise ClusterError(f"The links between the devices of {where} were not measured; run paceline probe JOB first.")
    return AlphaBeta(slowest.latency_s or INSIDE_ALPHA_S[node.device_kind], 1 / slowest.bytes_per_s)
