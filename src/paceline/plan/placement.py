"""Spreads a job over devices: how many workers each node gets, which of its devices, and in which order.

A ring all_reduce is as fast as its slowest link, so the K devices are those whose best ring has the highest bottleneck
bandwidth. In full, the first that tells two choices apart decides:

1. No two of the chosen are joined by SYS, the link between sockets: other collectives use more pairs than a ring's.
2. No link of the ring is SYS.
3. The highest bottleneck bandwidth, then 4. the highest sum around the ring.
5. The fewest NUMA nodes.
6. The shortest way from any of them to a network card: by label, then by bandwidth.
7. The lowest ids, compared in ascending order.

Of the rings over the chosen devices that 1 to 4 leave, it is the first one in the order of ids, from the lowest id
towards the smaller of its two neighbours. Links with unknown bandwidth come last, in the order of their labels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, pairwise, permutations, product, repeat

from paceline.errors import ClusterError, JobError
from paceline.spec import AlgorithmName, Cluster, Job, Mesh, Node, Plan
from paceline.spec.cluster import DeviceChoice, DeviceKind, DeviceRing, Link, num_nvlinks
from paceline.spec.plan import AXES, NodePlacement, check_mesh
from paceline.words import number_of

_MOST_RINGS = 20_000
"""So many rings are all tried, as over any of 8 devices or 4 of 16; of more only devices with neighbouring ids are, in
this order."""
_MOST_ORDERED = 8
"""Up to this many devices of a node all orders on a mesh are tried; more keep the order of their ring."""
ACROSS_SOCKETS = "SYS"
_NEARNESS = {ACROSS_SOCKETS: 1, "NODE": 2, "PHB": 3, "PXB": 4, "PIX": 5}
"""The nearness of the ends of a PCIe label; an unknown label is 0, and k NVLinks are 6 + k."""


def pick(node: Node, num_devices: int, allowed: Sequence[int] | None = None) -> DeviceChoice:
    """The `num_devices` devices of a node with the best ring, by the order at the top of this module. Raises
    `ClusterError` for fewer devices than asked for. `allowed`: indices of the devices to choose among; None: all of the
    node."""
    by_index = {device.index: device for device in node.devices if allowed is None or device.index in allowed}
    indices = sorted(by_index)
    if not 1 <= num_devices <= len(indices):
        raise ClusterError(
            f"{num_devices} devices cannot be chosen: {node.hostname or 'the node'} has "
            f"{number_of(len(indices), 'device')} to choose from."
        )
    links = _links(node, indices)
    rates = {pair: _rate(link) for pair, link in links.items()}
    across = {pair for pair, link in links.items() if link is not None and link.label == ACROSS_SOCKETS}
    to_cards = {index: [node.link(by_index[index].label, card) for card in node.nics] for index in indices}
    nearest = {
        index: max(((_nearness(way), _rate(way)) for way in to_cards[index]), default=(0, 0)) for index in indices
    }

    def rank(ring: Sequence[int]) -> tuple[object, ...]:
        """What the rules 1 to 7 above compare, in their order; larger is better."""
        hops = list(pairwise([*ring, *ring[:1]]))
        return (
            across.isdisjoint(combinations(ring, 2)),
            across.isdisjoint(hops),
            min(rates[hop] for hop in hops),
            sum(rates[hop] for hop in hops),
            -len({by_index[index].numa_node for index in ring}),
            max(nearest[index] for index in ring),
            [-index for index in sorted(ring)],
        )

    def ring_of(devices: Sequence[int]) -> DeviceRing:
        slowest = min(pairwise([*devices, *devices[:1]]), key=lambda hop: (rates[hop], hop not in across))
        return DeviceRing(tuple(devices), links[slowest])

    is_uniform = len({(rates[pair], pair in across) for pair in combinations(indices, 2)}) < 2
    rings_of_a_set = 1 if is_uniform else max(1, math.factorial(num_devices - 1) // 2)
    is_exact = math.comb(len(indices), num_devices) * rings_of_a_set <= _MOST_RINGS
    sets: Iterable[Sequence[int]] = combinations(indices, num_devices)
    if not is_exact:
        sets = (indices[first : first + num_devices] for first in range(len(indices) - num_devices + 1))
    rings = _rings(sets) if is_exact and not is_uniform else sets
    return DeviceChoice(ring_of(max(rings, key=rank)), ring_of(indices[:num_devices]), is_exact)  # of equals the first


def _links(node: Node, indices: Sequence[int]) -> dict[tuple[int, int], Link | None]:
    """The link of each pair of devices, in both orders; None: not known, or a device with itself."""
    labels = {device.index: device.label for device in node.devices}
    by_ends = {ends: link for link in node.links for ends in (link.ends, link.ends[::-1])}
    return {(one, other): by_ends.get((labels[one], labels[other])) for one, other in product(indices, repeat=2)}


def _nearness(link: Link | None) -> int:
    if link is not None and (count := num_nvlinks(link.label)):
        return max(_NEARNESS.values()) + 1 + count
    return 0 if link is None else _NEARNESS.get(link.label, 0)


def _rate(link: Link | None) -> int:
    """Bytes/s, in whole numbers, which add up exactly; where they are unknown the nearness, which is less."""
    return round(link.bytes_per_s) if link is not None and link.bytes_per_s else _nearness(link)


def _rings(sets: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Every ring over each of the sets once, in the order of ids, from its lowest towards the smaller neighbour."""
    for first, *rest in sets:
        for order in permutations(rest):
            if len(order) < 2 or order[0] < order[-1]:
                yield (first, *order)


def mesh_order(node: Node, ring: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    """The devices of `ring`, which work on this node, in the order of their ranks on a mesh.

    The axis that sends most gets the fastest links: ranks are laid out with the tensor axis innermost, then fsdp, dp
    and pp. Of all orders of up to 8 devices it is the one whose slowest hop along the innermost axis is fastest, then
    the one with the largest sum of these hops, then by the same of the next axis, and so on. Groups that do not lie
    evenly in the node have no say.
    """
    num_devices, stride = len(ring), 1
    hops_by_axis = []
    for degree in map(mesh.degree, reversed(AXES)):
        if degree > 1 and num_devices % (stride * degree) == 0:
            steps = [(place // stride + 1) % degree - place // stride % degree for place in range(num_devices)]
            hops_by_axis.append([(place, place + stride * step) for place, step in enumerate(steps)])
        stride *= degree
    if num_devices > _MOST_ORDERED or not hops_by_axis:
        return tuple(ring)
    rates = {pair: _rate(link) for pair, link in _links(node, ring).items()}

    def worth(order: tuple[int, ...]) -> list[tuple[int, int]]:
        of_axes = [[rates[order[one], order[other]] for one, other in hops] for hops in hops_by_axis]
        return [(min(of_axis), sum(of_axis)) for of_axis in of_axes]

    # Along each axis groups are rings, so that any device may be the first one.
    return max(((ring[0], *rest) for rest in permutations(ring[1:])), key=worth)


def spread(cluster: Cluster, num_workers: int, threads_per_worker: int | None = None, mesh: Mesh | None = None) -> Plan:
    """A plan for `num_workers` workers, one a device, on as few nodes as hold them, the first ones first. Raises
    `JobError` for no worker, or more workers than GPUs. CPU workers may outnumber cores: they share them.

    Args:
        mesh: the axes that the devices of a node are put in order for; None: they make one ring.
        threads_per_worker: None: an even part of the cores of the node with the most workers.
    """
    if num_workers < 1:
        raise JobError(f"{num_workers} workers cannot train; use at least 1.")
    kind, free = cluster.device_kind, [len(_free(node)) for node in cluster.nodes]
    num_free = sum(free)
    if kind == "cuda" and num_workers > num_free:
        where = "this machine has" if len(cluster.nodes) == 1 else f"these {len(cluster.nodes)} nodes have"
        busy = [device for device in cluster.devices if device.busy]
        others = "".join(f"; GPU {device.index} is {device.busy}" for device in busy)
        raise JobError(
            f"{num_workers} workers need as many GPUs, but {where} {num_free}{' free' * bool(busy)}{others}."
        )
    by_node = zip(cluster.nodes, workers_by_node(min(num_workers, num_free), free, 0), strict=False)
    used = [(node, count) for node, count in by_node if count]
    more, rest = divmod(max(num_workers - num_free, 0), len(used))  # CPU workers beyond the devices, for each in turn
    counts = [(node, count + more + (turn < rest)) for turn, (node, count) in enumerate(used)]
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


def workers_by_node(count: int, nodes: Sequence[int], further: int) -> tuple[int, ...]:
    """Workers on each node, one a device: `nodes` have so many devices, all nodes after them `further`."""
    found: list[int] = []
    for num_devices in chain(nodes, repeat(further)):
        if not (left := count - sum(found)):
            break
        found.append(min(num_devices, left))
    return tuple(found)


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
    """A plan for `num_workers` workers, one a device. Raises `JobError` for no worker, more workers than GPUs or than
    virtual shards, more servers than workers, or an algorithm that bitwise parity cannot use.

    Args:
        mesh: the axes they are laid out on; None: all of them share the batch.
        threads_per_worker: None: an even part of the node's cores; always 1 with `parity = "bitwise"`, because how a
            kernel splits its sums among threads may change their last bits.
    """
    plan = spread(cluster, num_workers, threads_per_worker, mesh)
    check_mesh(job, mesh or Mesh(dp=num_workers))
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
