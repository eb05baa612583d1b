"""The sum over all workers in the fixed tree of `fixed_tree.py`: the same bits wherever the leaves are.

The vector is cut into a row for each node, and each row into a column for each worker of a node. In its node, every
worker gets its columns of what the others hold, and adds up the blocks of the tree that lie inside the node. It sends
them to the workers of the other nodes that finish the tree for those columns of their rows, gets the sums back,
and gives them to the workers of its node. So a link between N nodes carries 2 (N - 1) / N of the vector in either
direction where each node has one block, as in `hierarchical`, however many workers a node has. Blocks of several
numbers of leaves, or of workers that are no neighbours, travel each for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.fixed_tree import Block, Leaves, TreeSum, aligned_blocks, blocks_of_runs, finish_tree
from paceline.comm.hierarchical import chunk_length, run_pipelined
from paceline.comm.links import Links


def tree_all_reduce(partials: Sequence[Tensor], runs: Sequence[Leaves], total: Tensor, links: Links | None) -> Tensor:
    """The sum over all leaves of all workers, bit for bit the same for any distribution of the leaves.

    Args:
        partials: this worker's block sums, flat tensors of one length, in the order of `aligned_blocks`; may be
            overwritten.
        runs: leaves (start, stop) of each rank; together they tile 0 … num_leaves, in the order of the ranks.
        total: a tensor like a partial, which the sum may be written to.
        links: None in a world of one.

    Returns:
        `total`, or in a world of one perhaps a partial.
    """
    if links is None:
        ready = dict(zip(aligned_blocks(*runs[0]), partials, strict=True))
        return finish_tree(ready, runs[0][1])
    division = _Division.of(runs, links)
    length = chunk_length(total) if len(links.nodes) > 1 else len(total)
    pieces = [partial.split(length) for partial in partials]
    chunks = enumerate(total.split(length) if len(total) else ())
    run_pipelined([_sum([piece[number] for piece in pieces], chunk, division, links) for number, chunk in chunks])
    return total


def tree_exact(values: Tensor, links: Links) -> None:
    """The tree over workers, one leaf each: the same bits for one order of the workers, however the vector is cut."""
    runs = [(rank, rank + 1) for rank in range(links.world_size)]
    tree_all_reduce([values.clone()], runs, values, links)


@dataclass(frozen=True)
class _Columns:
    """The part of each node's row that is one worker's."""

    node: int
    """The number of the worker's node."""
    place: int
    """The worker's number in its node."""
    num_workers: int
    """The number of workers of the node, and of columns."""

    def span(self, length: int) -> tuple[int, int]:
        """(start, end) of this worker's columns in a row of `length` elements."""
        whole, rest = divmod(length, self.num_workers)
        start = self.place * whole + min(self.place, rest)
        return start, start + whole + (self.place < rest)

    def of(self, row: Tensor) -> Tensor:
        start, stop = self.span(len(row))
        return row[start:stop]

    def shared_with(self, other: _Columns, length: int) -> slice:
        """What both workers have of a row of so many elements, counted from the first one that is this worker's."""
        start, stop = self.span(length)
        first, last = other.span(length)
        begin = max(first - start, 0)
        return slice(begin, max(begin, min(last, stop) - start))


@dataclass(frozen=True)
class _Division:
    """Which worker sums which blocks."""

    num_leaves: int
    blocks_of_rank: Sequence[Sequence[Block]]
    """The blocks that each worker sums."""
    blocks_of_node: Sequence[Sequence[Block]]
    """The blocks that each node has sums of, when its workers have summed theirs."""
    columns: Mapping[int, _Columns]
    """The columns of each rank, node after node."""

    @classmethod
    def of(cls, runs: Sequence[Leaves], links: Links) -> _Division:
        return cls(
            num_leaves=max(stop for _, stop in runs),
            blocks_of_rank=[aligned_blocks(*run) for run in runs],
            blocks_of_node=[blocks_of_runs(runs[rank] for rank in node) for node in links.nodes],
            columns={
                rank: _Columns(number, place, len(node))
                for number, node in enumerate(links.nodes)
                for place, rank in enumerate(node)
            },
        )

    def cut(self, values: Tensor, rank: int) -> list[Tensor]:
        """A worker's columns of every row of a vector."""
        return [self.columns[rank].of(row) for row in values.tensor_split(len(self.blocks_of_node))]

    def packed(self, vectors: Sequence[Tensor], rank: int, like: Tensor) -> Tensor:
        """A worker's columns of every row, of one vector after the other."""
        return _joined([columns for values in vectors for columns in self.cut(values, rank)], like)


def _sum(partials: Sequence[Tensor], total: Tensor, division: _Division, links: Links) -> Iterator[None]:
    """One chunk's way into `total`, stage by stage; every worker has the same number of stages."""
    mine = division.columns[links.rank]
    near = [rank for rank in links.node if rank != links.rank]
    far = {rank: other for rank, other in division.columns.items() if other.node != mine.node}
    of_rows = [len(row) for row in total.tensor_split(len(links.nodes))]
    places = division.cut(total, links.rank)
    widths = [len(place) for place in places]

    # In the node, each worker adds up its columns of what all have.
    outgoing = {rank: division.packed(partials, rank, total) for rank in near}
    incoming = {rank: total.new_empty(len(division.blocks_of_rank[rank]), sum(widths)) for rank in near}
    transfer = links.exchange(outgoing, incoming)
    yield
    transfer.wait()
    summed = TreeSum[Tensor]()
    for rank in sorted(links.node):
        own = (division.packed([partial], rank, total) for partial in partials)
        for block, values in zip(division.blocks_of_rank[rank], incoming.get(rank, own), strict=True):
            summed.push_block(block, values)

    # Between nodes, what it has of a row goes to those who finish it, and what others have of its own row comes.
    rows_of_blocks = [values.split(widths) for values in summed.partials]
    outgoing, incoming = {}, {}
    for rank, other in far.items():
        part = mine.shared_with(other, of_rows[other.node])
        outgoing[rank] = _joined([rows[other.node][part] for rows in rows_of_blocks], total)
        part = mine.shared_with(other, of_rows[mine.node])
        incoming[rank] = total.new_empty(len(division.blocks_of_node[other.node]), part.stop - part.start)
    transfer = links.exchange(outgoing, incoming)
    yield
    transfer.wait()
    ready = {
        block: rows[mine.node] for block, rows in zip(division.blocks_of_node[mine.node], rows_of_blocks, strict=True)
    }
    for number, node in enumerate(links.nodes):
        if number != mine.node:
            values = torch.cat([incoming[rank] for rank in node], dim=1)
            ready |= zip(division.blocks_of_node[number], values, strict=True)
    places[mine.node].copy_(finish_tree(ready, division.num_leaves))

    # The sums go back to all nodes,
    outgoing = {rank: places[mine.node][mine.shared_with(other, of_rows[mine.node])] for rank, other in far.items()}
    incoming = {rank: places[other.node][mine.shared_with(other, of_rows[other.node])] for rank, other in far.items()}
    transfer = links.exchange(outgoing, incoming)
    yield
    transfer.wait()

    # and from there to all workers.
    places_of = {rank: division.cut(total, rank) for rank in near}
    incoming = {rank: _place_for(others) for rank, others in places_of.items()}
    transfer = links.exchange(dict.fromkeys(near, _joined(places, total)), incoming)
    yield
    transfer.wait()
    for rank, others in places_of.items():
        for place, values in zip(others, incoming[rank].split([len(one) for one in others]), strict=True):
            if len(others) > 1:
                place.copy_(values)


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Perhaps of none, then an empty one of the dtype of `like`."""
    return parts[0] if len(parts) == 1 else torch.cat([like[:0], *parts])


def _place_for(parts: Sequence[Tensor]) -> Tensor:
    """A message's memory whose parts go to these places; the only place itself."""
    return parts[0] if len(parts) == 1 else parts[0].new_empty(sum(len(part) for part in parts))
