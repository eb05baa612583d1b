"""The cost of a sum over all workers, for every algorithm that a run can use.

The model is that of Hockney 1994 ("The communication challenge for MPP") on two levels: a message of b bytes takes
alpha_s + b * beta_s_per_byte on the kind of link it uses. A worker has a link of its own to the others of its node;
all workers of a node share the node's one link to other nodes. Links carry both directions at once, and messages that
are sent together share the link but not the waiting: latencies overlap, what the software adds to each one does not.

K below is the time that one full copy of the vector takes on the slowest link that is used, n the number of workers.
Adding up is not priced: it is many times faster than a link.

The times of a network may be arrays, a value for each of many networks at once; then the cost is one too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.errors import JobError
from paceline.plan.model import Layout, Network
from paceline.spec import AlgorithmName
from paceline.spec.algorithm import ALGORITHM_FACTS, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, NUM_CHUNKS, AlphaBeta
from paceline.spec.wire import WIRE_FACTS

Cost = Callable[[float, Layout, Network], float]
"""(size_bytes, layout, network) -> seconds."""

WIRE_FACTORS: dict[str, float] = {name: facts.bytes_per_value / 4 for name, facts in WIRE_FACTS.items()}
"""Bytes of a message in a wire format over its bytes in float32."""


def cost_s(
    algorithm: AlgorithmName, size_bytes: float, layout: Layout, network: Network, *, wire: str = "float32"
) -> float:
    """Seconds of one sum of `size_bytes` of float32 with messages in a wire format; one without a price counts as
    float32, the most it costs.

    Raises:
        JobError: an algorithm without a price.
    """
    cost, factor = cost_of(algorithm), WIRE_FACTORS.get(wire, 1.0)
    if factor == 1.0 or ALGORITHM_FACTS[algorithm].ignores_wire:
        return cost(size_bytes, layout, network)
    if ALGORITHM_FACTS[algorithm].has_levels:  # inside a node values stay as they are
        between = dataclasses.replace(network.between, beta_s_per_byte=factor * network.between.beta_s_per_byte)
        return cost(size_bytes, layout, dataclasses.replace(network, between=between))
    if algorithm == "all_reduce":  # the backend would add in the wire format, so it is done by direct messages
        return 2 * _gather_s(factor * size_bytes, layout.workers_per_node, layout.workers_per_node, network)
    return cost(factor * size_bytes, layout, network)


def cost_of(algorithm: AlgorithmName) -> Cost:
    """What prices an algorithm's sums. Raises `JobError` if nothing does."""
    if algorithm not in COSTS:
        raise JobError(f"The algorithm {algorithm} has no cost formula; there are formulas for {', '.join(COSTS)}.")
    return COSTS[algorithm]


def ring(size_bytes: float, layout: Layout, network: Network) -> float:
    """2 (n - 1) rounds of 1 / n of the vector, T = 2 (n - 1) / n K + 2 (n - 1) alpha (Patarasuk and Yuan 2009).

    The ring enters and leaves each node once, so that no link between nodes carries two messages in one direction; a
    round is as slow as its slowest hop.
    """
    n = layout.num_workers
    return 2 * (n - 1) * _hop_s(size_bytes / n, layout, network)


def all_reduce(size_bytes: float, layout: Layout, network: Network) -> float:
    """The backend's all_reduce: a ring, or between many nodes two trees if they are faster, as NCCL chooses.

    Two binary trees over N nodes each carry half of the vector up and down again, T = 2 K + 2 log2(N) alpha (Sanders,
    Speck and Traeff 2009), after a ring in each node. Gloo always takes the ring, which differs for short vectors only.
    """
    ring_s = ring(size_bytes, layout, network)
    if layout.num_nodes == 1:
        return ring_s
    inside_s = ring(size_bytes, Layout((max(layout.workers_per_node),)), network)
    hop_s = network.between.alpha_s + network.per_message_s
    trees_s = 2 * math.ceil(math.log2(layout.num_nodes)) * hop_s + 2 * size_bytes * network.between.beta_s_per_byte
    return _shorter(ring_s, inside_s + trees_s)


def parameter_server(size_bytes: float, layout: Layout, network: Network) -> float:
    """All send to one server, the first worker, and get the sum back.

    With one worker a node T = 2 (n - 1) K: the server's link carries n - 1 vectors each way (Li et al. 2014, "Scaling
    Distributed Machine Learning with the Parameter Server").
    """
    return 2 * _gather_s(size_bytes, layout.workers_per_node, (1,) + (0,) * (layout.num_nodes - 1), network)


def parameter_server_two_level(size_bytes: float, layout: Layout, network: Network) -> float:
    """Sums inside a node first; only its leader exchanges with the server.

    With g workers a node its link carries 1 / g of what `parameter_server` sends over it.
    """
    inside_s = _reduce_in_node_s(size_bytes, layout, network) + _broadcast_in_node_s(size_bytes, layout, network)
    return inside_s + parameter_server(size_bytes, Layout((1,) * layout.num_nodes), network)


def hierarchical(size_bytes: float, layout: Layout, network: Network) -> float:
    """Sum in each node, between the leaders by direct messages, hand out in each node; chunks, so that both overlap.

    For N nodes the link between carries 2 (N - 1) / N of the vector, however many workers a node has. A pipeline of
    two stages takes the slower one for all chunks and the other one for a single chunk. One node has no levels: there
    the workers sum through the memory they share, which moves as much as a ring does, in two rounds.
    """
    n, nodes = layout.num_workers, layout.num_nodes
    if n == 1:
        return 0.0
    if nodes == 1:
        return 2 * (n - 1) / n * size_bytes * network.inside.beta_s_per_byte + 2 * _start_s(network.inside, network)

    def inside_s(chunk_bytes: float) -> float:
        return _reduce_in_node_s(chunk_bytes, layout, network) + _broadcast_in_node_s(chunk_bytes, layout, network)

    return _two_levels_s(size_bytes, layout, network, inside_s)


def tree_exact(size_bytes: float, layout: Layout, network: Network) -> float:
    """Every worker sums its slice in a fixed order, in each node and then between nodes, and hands it out again.

    T = 2 (n - 1) / n K in one node or with one worker a node, by direct messages. The link between N nodes carries
    2 (N - 1) / N of the vector where each node's shards are one block of the tree; in chunks, as in `hierarchical`.
    """
    slices = (max(layout.workers_per_node),)

    def inside_s(chunk_bytes: float) -> float:
        return 2 * _gather_s(chunk_bytes, slices, slices, network)

    return inside_s(size_bytes) if layout.num_nodes == 1 else _two_levels_s(size_bytes, layout, network, inside_s)


COSTS: dict[AlgorithmName, Cost] = {
    "all_reduce": all_reduce,
    "all_to_one": parameter_server,
    "parameter_server": parameter_server,
    "parameter_server_two_level": parameter_server_two_level,
    "ring": ring,
    "hierarchical": hierarchical,
    "tree_exact": tree_exact,
}


def _two_levels_s(size_bytes: float, layout: Layout, network: Network, inside_s: Callable[[float], float]) -> float:
    """Sums inside nodes and between them, by chunks under way at the same time.

    Args:
        inside_s: seconds that a chunk of so many bytes takes in its node, both ways.
    """
    chunk_bytes = min(max(size_bytes / NUM_CHUNKS, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES, max(size_bytes, 1.0))
    num_chunks = math.ceil(size_bytes / chunk_bytes) if size_bytes else 1
    chunk_bytes = size_bytes / num_chunks
    slices = (1,) * layout.num_nodes
    wire_s = 2 * _gather_s(chunk_bytes, slices, slices, network)
    # Several chunks are on the link at a time, so that only one of them waits for its answer with nothing on the link.
    busy_s = wire_s - 2 * network.between.alpha_s
    in_node_s = inside_s(chunk_bytes)
    return _longer(num_chunks * in_node_s + wire_s, num_chunks * busy_s + 2 * network.between.alpha_s + in_node_s)


def _longer(one: Any, other: Any) -> float:
    """The larger of two times, element by element where they are arrays."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return max(one, other)
    longer: float = np.maximum(one, other)
    return longer


def _shorter(one: float, other: float) -> float:
    return -_longer(-one, -other)


def _start_s(level: AlphaBeta, network: Network) -> float:
    return level.alpha_s + network.per_message_s


def _hop_s(size_bytes: float, layout: Layout, network: Network) -> float:
    """One message from each worker to the next one in the order of the nodes, all at once."""
    slowest_s = 0.0
    if max(layout.workers_per_node) > 1:
        slowest_s = network.inside.seconds(size_bytes)
    if layout.num_nodes > 1:
        slowest_s = _longer(slowest_s, network.between.seconds(size_bytes))
    return slowest_s + network.per_message_s


def _gather_s(size_bytes: float, workers: Sequence[int], servers: Sequence[int], network: Network) -> float:
    """Every worker sends every server the slice it owns; the way back takes as long.

    Args:
        workers, servers: how many each node has; servers are workers too and keep their own slice.
    """
    num_workers, num_servers = sum(workers), sum(servers)
    if num_workers == 1:
        return 0.0
    part_bytes = size_bytes / num_servers
    crossing = 0  # slices over the busiest link between nodes, in its busier direction
    inside = 0  # slices over the busiest link of a worker inside a node
    num_messages = 0  # of the busiest worker
    for own_workers, own_servers in zip(workers, servers, strict=True):
        arriving = own_servers * (num_workers - own_workers)
        leaving = own_workers * (num_servers - own_servers)
        crossing = max(crossing, arriving, leaving)
        if own_servers and own_workers > 1:
            sent = own_servers - (own_servers == own_workers)
            inside = max(inside, own_workers - 1, sent)
        sent = num_servers - (own_servers == own_workers)
        num_messages = max(num_messages, num_workers - 1 if own_servers else sent)
    across_s = network.between.seconds(crossing * part_bytes) if crossing else 0.0
    inside_s = network.inside.seconds(inside * part_bytes) if inside else 0.0
    return _longer(across_s, inside_s) + num_messages * network.per_message_s


def _reduce_in_node_s(size_bytes: float, layout: Layout, network: Network) -> float:
    """Slices are summed on all workers and collected by the leader: 2 (g - 1) / g of the vector over its link."""
    g = max(layout.workers_per_node)
    if g == 1:
        return 0.0
    return 2 * (g - 1) / g * size_bytes * network.inside.beta_s_per_byte + _start_s(network.inside, network)


def _broadcast_in_node_s(size_bytes: float, layout: Layout, network: Network) -> float:
    """All workers read the leader's values at once."""
    if max(layout.workers_per_node) == 1:
        return 0.0
    return size_bytes * network.inside.beta_s_per_byte + _start_s(network.inside, network)
