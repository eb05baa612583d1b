"""Two levels: in each node, between the nodes' leaders, in each node again, by chunks so that both work at once.

A chunk is summed over its node's workers to the leader; the leaders sum it by reduce-scatter and all-gather, each
with each; the leader gives it to its node. For n nodes each link between nodes carries 2 (n - 1) / n of the vector in
either direction, however many workers a node has: a flat ring of w workers carries 2 (w - 1) / w. While one chunk
is between nodes, others are inside one, and several are between nodes at a time, for a link that waits for an answer
carries nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from torch import Tensor

from paceline.comm.links import Links
from paceline.comm.parameter_server import stages_at_servers
from paceline.spec.algorithm import MIN_CHUNK_BYTES, NUM_CHUNKS

_MAX_CHUNK_BYTES = 2 << 20


def hierarchical(values: Tensor, links: Links) -> None:
    """Sum `values` over all workers; one node leaves it to the backend. A lossy wire format rounds between nodes only:
    once before the sum, once after."""
    if len(links.nodes) > 1:
        run_pipelined([_sum(chunk, links) for chunk in values.split(chunk_length(values)) if len(chunk)])
    else:
        links.all_reduce(values)


def _sum(chunk: Tensor, links: Links) -> Iterator[None]:
    """One chunk's way, stage by stage; every worker has the same number of stages."""
    links.reduce_in_node(chunk)
    yield
    if links.rank in links.leaders:
        # Each leader adds to what it has itself.
        own_first = sorted(links.leaders, key=lambda leader: leader != links.rank)
        yield from stages_at_servers(chunk, links, workers=own_first, servers=links.leaders)
    else:
        yield
        yield
    links.broadcast_in_node(chunk)


def chunk_length(values: Tensor) -> int:
    """How many elements of a vector are a chunk."""
    return min(max(values.nbytes // NUM_CHUNKS, MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES) // values.itemsize


def run_pipelined(chunks: Iterable[Iterator[None]]) -> None:
    """Run the chunks as a pipeline: in each round start one more chunk and advance every started one by a stage, newest
    first. The order is the same on every worker. `chunks`: one iterator per chunk, which yields after it has begun to
    send; equally often on every worker."""
    waiting, under_way = deque(chunks), deque[Iterator[None]]()
    while waiting or under_way:
        if waiting:
            under_way.appendleft(waiting.popleft())
        # Newest first: what can be put on a link is there before an older message is waited for.
        under_way = deque(chunk for chunk in tuple(under_way) if next(chunk, StopIteration) is not StopIteration)
