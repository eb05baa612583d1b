"""The cost of a sum over all workers, for every algorithm that a run can use.

The model is that of Hockney 1994 ("The communication challenge for MPP") on two levels: a message of b bytes takes
alpha_s + b * beta_s_per_byte on the kind of link it uses. A worker has a link of its own to the others of its node;
all workers of a node share the node's one link to other nodes. Links carry both directions at once, and messages that
are sent together share the link but not the waiting: their latencies overlap.

K below is the time that one full copy of the vector takes on the slowest link that is used, n the number of workers.
Adding up is not priced: it is many times faster than a link. The times of a network may be arrays, a value for each of
many networks at once; then the cost is one too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import JobError
from paceline.spec import AlgorithmName
from paceline.spec.algorithm import MIN_CHUNK_BYTES, NUM_CHUNKS

Workers = Sequence[int]
"""The number of workers on each node."""


@dataclass(frozen=True)
class Network:
    """Links inside a node, and between nodes, which all workers of a node share; both directions at once."""

    inside_alpha_s: float = 0.0
    inside_beta_s_per_byte: float = 0.0
    between_alpha_s: float = 0.0
    between_beta_s_per_byte: float = 0.0

    def inside_s(self, num_bytes: float) -> float:
        return self.inside_alpha_s + num_bytes * self.inside_beta_s_per_byte

    def between_s(self, num_bytes: float) -> float:
        return self.between_alpha_s + num_bytes * self.between_beta_s_per_byte


Cost = Callable[[float, Workers, Network], Any]
"""(size_bytes, workers on each node, network) -> seconds."""


def cost_of(algorithm: AlgorithmName) -> Cost:
    """The formula for the time of an algorithm's sums. Raises `JobError` if there is none."""
    if algorithm not in COSTS:
        raise JobError(f"The algorithm {algorithm} has no cost formula; there are formulas for {', '.join(COSTS)}.")
    return COSTS[algorithm]


def ring(size_bytes: float, workers: Workers, network: Network) -> Any:
    """2 (n - 1) rounds of 1 / n of the vector, T = 2 (n - 1) / n K + 2 (n - 1) alpha (Patarasuk and Yuan 2009).

    The ring enters and leaves each node once, so that no link between nodes carries two messages in one direction; a
    round is as slow as its slowest hop.
    """
    n = sum(workers)
    inside_s = network.inside_s(size_bytes / n) if max(workers) > 1 else 0.0
    between_s = network.between_s(size_bytes / n) if len(workers) > 1 else 0.0
    return 2 * (n - 1) * np.maximum(inside_s, between_s)


def all_reduce(size_bytes: float, workers: Workers, network: Network) -> Any:
    """The backend's all_reduce: a ring, or between many nodes two trees if they are faster, as NCCL chooses.

    Two binary trees over N nodes each carry half of the vector up and down again, T = 2 K + 2 log2(N) alpha (Sanders,
    Speck and Traeff 2009), after a ring in each node. Gloo always takes the ring, which differs for short vectors only.
    """
    ring_s = ring(size_bytes, workers, network)
    if len(workers) == 1:
        return ring_s
    num_levels = math.ceil(math.log2(len(workers)))
    trees_s = 2 * num_levels * network.between_alpha_s + 2 * size_bytes * network.between_beta_s_per_byte
    return np.minimum(ring_s, ring(size_bytes, [max(workers)], network) + trees_s)


def parameter_server(size_bytes: float, workers: Workers, network: Network) -> Any:
    """All send to one server, the first worker, and get the sum back.

    With one worker a node T = 2 (n - 1) K: the server's link carries n - 1 vectors each way (Li et al. 2014, "Scaling
    Distributed Machine Learning with the Parameter Server").
    """
    beside, elsewhere = workers[0] - 1, sum(workers[1:])
    inside_s = network.inside_s(beside * size_bytes) if beside else 0.0
    between_s = network.between_s(elsewhere * size_bytes) if elsewhere else 0.0
    return 2 * np.maximum(inside_s, between_s)


def parameter_server_two_level(size_bytes: float, workers: Workers, network: Network) -> Any:
    """Sums inside a node first; only its leader exchanges with the server: with g workers a node, the link carries
    1 / g of what `parameter_server` sends over it."""
    between_s = parameter_server(size_bytes, [1] * len(workers), network)
    return _through_leader_s(size_bytes, max(workers), network) + between_s


def hierarchical(size_bytes: float, workers: Workers, network: Network) -> Any:
    """Sum in each node, between the leaders by direct messages, hand out in each node.

    For N nodes the link between carries 2 (N - 1) / N of the vector, however many workers a node has. One node has no
    levels: there the workers sum through the memory they share, which moves as much as a ring does, in two rounds.
    """
    if len(workers) == 1:
        return _direct_s(size_bytes, workers[0], network.inside_s)
    return _two_levels_s(size_bytes, workers, network, _through_leader_s(size_bytes, max(workers), network))


def tree_exact(size_bytes: float, workers: Workers, network: Network) -> Any:
    """Every worker sums its slice in a fixed order, in each node and then between nodes, and hands it out again.

    T = 2 (n - 1) / n K in one node or with one worker a node, by direct messages. The link between N nodes carries
    2 (N - 1) / N of the vector where each node's shards are one block of the tree.
    """
    inside_s = _direct_s(size_bytes, max(workers), network.inside_s)
    return inside_s if len(workers) == 1 else _two_levels_s(size_bytes, workers, network, inside_s)


COSTS: dict[AlgorithmName, Cost] = {
    "all_reduce": all_reduce,
    "all_to_one": parameter_server,
    "parameter_server": parameter_server,
    "parameter_server_two_level": parameter_server_two_level,
    "ring": ring,
    "hierarchical": hierarchical,
    "tree_exact": tree_exact,
}


def _direct_s(size_bytes: float, n: int, link_s: Callable[[float], float]) -> Any:
    """Each of n workers gets its slice of 1 / n from all others at once, and hands its sum out again."""
    return 2 * link_s((n - 1) / n * size_bytes) if n > 1 else 0.0


def _through_leader_s(size_bytes: float, g: int, network: Network) -> Any:
    """Slices are summed on all g workers of a node and collected by the leader, over whose link 2 (g - 1) / g of the
    vector go; later all read the leader's values at once."""
    num_copies = 2 * (g - 1) / g + 1
    return num_copies * size_bytes * network.inside_beta_s_per_byte + 2 * network.inside_alpha_s if g > 1 else 0.0


def _two_levels_s(size_bytes: float, workers: Workers, network: Network, inside_s: Any) -> Any:
    """Sums inside nodes, which take `inside_s`, and by direct messages between them, by chunks under way at the same
    time: a pipeline of two stages takes the slower one for all chunks and the other one for a single chunk."""
    between_s = _direct_s(size_bytes, len(workers), network.between_s)
    num_chunks = min(max(size_bytes / MIN_CHUNK_BYTES, 1.0), float(NUM_CHUNKS))
    return np.maximum(inside_s, between_s) + np.minimum(inside_s, between_s) / num_chunks
