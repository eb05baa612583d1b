"""A vector in chunks that are sent at the same time: some between nodes, others inside of nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from torch import Tensor

from paceline.spec.algorithm import MIN_CHUNK_BYTES, NUM_CHUNKS

_MAX_CHUNK_BYTES = 2 << 20


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
