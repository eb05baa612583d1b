"""Spreading a job over devices: which node gets how many workers."""

from __future__ import annotations

import dataclasses

from paceline.errors import JobError
from paceline.plan.pick import mesh_order, pick
from paceline.spec import AlgorithmName, Cluster, Job, Mesh, Node, Plan
from paceline.spec.cluster import DeviceKind
from paceline.spec.plan import NodePlacement, check_mesh


def spread(cluster: Cluster, num_workers: int, threads_per_worker: int | None = None, mesh: Mesh | None = None) -> Plan:
    """A plan for `num_workers` workers, one a device, on as few nodes as hold them, the first ones first.

    Args:
        mesh: the axes that the devices of a node are put in order for; None: they make one ring.
        threads_per_worker: None: an even part of the cores of the node with the most workers.

    Raises:
        JobError: no worker, or more workers than GPUs. CPU workers may outnumber cores: they share them.
    """
    if num_workers < 1:
        raise JobError(f"{num_workers} workers cannot train; use at least 1.")
    kind = cluster.device_kind
    num_free = sum(len(_free(node)) for node in cluster.nodes)
    if kind == "cuda" and num_workers > num_free:
        where = "this machine has" if len(cluster.nodes) == 1 else f"these {len(cluster.nodes)} nodes have"
        busy = [device for device in cluster.devices if device.busy]
        others = "".join(f"; GPU {device.index} is {device.busy}" for device in busy)
        raise JobError(
            f"{num_workers} workers need as many GPUs, but {where} {num_free}{' free' * bool(busy)}{others}."
        )
    counts = _workers_by_node(cluster, num_workers)
    threads = min(max(1, node.num_cores // count) for node, count in counts)
    plan = Plan(world_size=num_workers, device_kind=kind, threads_per_worker=threads_per_worker or threads)
    if kind == "cpu" and not any(node.is_remote for node, _ in counts):
        return plan
    return dataclasses.replace(plan, nodes=tuple(_node_placement(node, count, kind, mesh) for node, count in counts))


def _free(node: Node) -> list[int]:
    """Indices of the free devices."""
    return [device.index for device in node.devices if not device.busy]


def _node_placement(node: Node, num_workers: int, kind: DeviceKind, mesh: Mesh | None) -> NodePlacement:
    """The GPUs with the best ring among the free ones, each worker pinned near its GPU; on CPU, no pinning."""
    hostname = node.hostname if node.is_remote else ""
    if kind == "cpu":
        return NodePlacement(hostname, num_workers)
    devices = pick(node, num_workers, _free(node)).ring.devices
    if mesh is not None:
        devices = mesh_order(node, devices, mesh)
    by_index = {device.index: device for device in node.devices}
    return NodePlacement(hostname, num_workers, devices, tuple(by_index[index].cpus for index in devices))


def _workers_by_node(cluster: Cluster, num_workers: int) -> list[tuple[Node, int]]:
    """The nodes that get workers: one for each free device as long as there are, then one more for each in turn."""
    used: list[tuple[Node, int]] = []
    left = num_workers
    for node in cluster.nodes:
        count = min(len(_free(node)), left)
        if count:
            used.append((node, count))
            left -= count
    return [(node, count + left // len(used) + (turn < left % len(used))) for turn, (node, count) in enumerate(used)]


def place(
    job: Job,
    cluster: Cluster,
    num_workers: int,
    *,
    threads_per_worker: int | None = None,
    algorithm: AlgorithmName = "auto",
    num_servers: int = 1,
    mesh: Mesh | None = None,
) -> Plan:
    """A plan for `num_workers` workers, one a device.

    Args:
        mesh: the axes they are laid out on; None: all of them share the batch.
        threads_per_worker: None: an even part of the node's cores; always 1 with `parity = "bitwise"`, because how a
            kernel splits its sums among threads may change their last bits.

    Raises:
        JobError: no worker, more workers than GPUs or than virtual shards, no multiple of the job's groups, more
            servers than workers, or an algorithm that bitwise parity cannot use.
    """
    check_mesh(job, mesh)
    plan = spread(cluster, num_workers, threads_per_worker, mesh)
    num_assignments = num_workers if mesh is None else mesh.num_assignments
    if num_assignments > job.virtual_shards:
        raise JobError(
            f"{num_assignments} workers cannot share virtual_shards = {job.virtual_shards}; use at most "
            f"{job.virtual_shards} workers, or virtual_shards = {num_assignments} (it is part of the job: the same "
            "for every worker count)."
        )
    if num_servers > num_workers:
        raise JobError(f"{num_servers} servers are more than {num_workers} workers; servers are some of the workers.")
    if job.parity == "bitwise" and algorithm not in ("auto", "tree_exact"):
        raise JobError(
            f"parity = 'bitwise' sums gradients by tree_exact, not by {algorithm}; leave algorithm out or train with "
            "parity = 'numeric'."
        )
    return dataclasses.replace(
        plan,
        threads_per_worker=1 if job.parity == "bitwise" else plan.threads_per_worker,
        algorithm="tree_exact" if job.parity == "bitwise" else algorithm,
        num_servers=num_servers,
        mesh=mesh,
    )
