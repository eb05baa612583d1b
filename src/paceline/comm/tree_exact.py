"""A sum in one fixed order, whoever holds the summands: the arithmetic behind `parity = "bitwise"`.

Floating-point addition does not associate, so a sum is reproducible only if its order is. Here the order is a
binary tree over *leaves* (the virtual shards), never over workers:

    tree[a, b) = leaf a                                         if b - a = 1
                 tree[a, a + p) + tree[a + p, b)                else, p the largest power of two below b - a

A worker owns a run of neighbouring leaves. It adds whatever complete aligned blocks [k 2^j, (k + 1) 2^j) its
run contains; each of them is a node of the tree. The blocks of all workers tile the leaves, so a fixed order
remains for the rest of the tree. The vector is cut into one chunk a worker: blocks travel by all_to_all, each worker
finishes the tree for its chunk, and all_gather puts the chunks together. With powers of two everywhere each worker
has one block and sends 2 (n - 1) / n of the vector, as a ring does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.links import Links

Block = tuple[int, int]
"""First leaf and number of leaves (a power of two) of one aligned block."""


def aligned_blocks(start: int, stop: int) -> list[Block]:
    """The fewest aligned blocks that tile leaves start … stop - 1, in order."""
    blocks = []
    while start < stop:
        size = 1
        while start % (2 * size) == 0 and start + 2 * size <= stop:
            size *= 2
        blocks.append((start, size))
        start += size
    return blocks


class TreeSum:
    """Adds the leaves of one worker as they come; holds at most one partial sum per power of two.

    Leaves are pushed in ascending order and owned from then on: sums are formed in place.
    """

    def __init__(self, first_leaf: int) -> None:
        self._next = first_leaf
        self._stack: list[tuple[Block, Tensor]] = []

    def push(self, leaf: Tensor) -> list[Tensor]:
        """Returns the leaves in which no sum is kept any more."""
        block, total = (self._next, 1), leaf
        self._next += 1
        free = []
        while self._stack and _are_siblings(self._stack[-1][0], block):
            (start, size), left = self._stack.pop()
            left.add_(total)
            free.append(total)
            block, total = (start, 2 * size), left
        self._stack.append((block, total))
        return free

    @property
    def blocks(self) -> list[Block]:
        return [block for block, _ in self._stack]

    @property
    def partials(self) -> list[Tensor]:
        return [partial for _, partial in self._stack]


def _are_siblings(left: Block, right: Block) -> bool:
    return left[1] == right[1] and left[0] % (2 * left[1]) == 0 and left[0] + left[1] == right[0]


def finish_tree(blocks: Mapping[Block, Tensor], num_leaves: int) -> Tensor:
    """The root of the tree over `num_leaves` leaves from the sums of blocks that tile it; may overwrite them."""

    def node(start: int, stop: int) -> Tensor:
        ready = blocks.get((start, stop - start))
        if ready is not None:
            return ready
        half = 1 << ((stop - start - 1).bit_length() - 1)
        return node(start, start + half).add_(node(start + half, stop))

    return node(0, num_leaves)


def tree_all_reduce(
    partials: Sequence[Tensor],
    runs: Sequence[tuple[int, int]],
    like: Tensor,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The sum over all leaves of all workers, bit for bit the same for any distribution of the leaves.

    Args:
        partials: this worker's block sums, flat tensors of one length, in the order of `aligned_blocks`.
        runs: leaves (start, stop) of each rank; together they tile 0 … num_leaves.
        like: an empty tensor with the dtype, device and length of a partial, for a worker that owns no leaf.
        group: None in a world of one.
    """
    blocks_of = [aligned_blocks(start, stop) for start, stop in runs]
    num_leaves = max(stop for _, stop in runs)
    if group is None:
        return finish_tree(dict(zip(blocks_of[0], partials, strict=True)), num_leaves)

    rank, world_size = dist.get_rank(group), len(runs)
    length = like.numel()
    chunk = -(-length // world_size)
    padded = [torch.nn.functional.pad(one, (0, world_size * chunk - length)) for one in partials]
    parts = [one.view(world_size, chunk) for one in padded]
    outgoing = parts[0] if len(parts) == 1 else torch.cat([like.new_empty((world_size, 0)), *parts], dim=1)
    counts = [len(blocks) for blocks in blocks_of]
    incoming = like.new_empty((sum(counts), chunk))
    dist.all_to_all_single(
        incoming.view(-1),
        outgoing.reshape(-1),
        output_split_sizes=[count * chunk for count in counts],
        input_split_sizes=[counts[rank] * chunk] * world_size,
        group=group,
    )
    tiles = [block for blocks in blocks_of for block in blocks]
    mine = finish_tree(dict(zip(tiles, incoming, strict=True)), num_leaves)
    gathered = like.new_empty((world_size, chunk))
    dist.all_gather(list(gathered.unbind()), mine.contiguous(), group=group)
    return gathered.view(-1)[:length]


def tree_exact(values: Tensor, links: Links) -> None:
    """The tree over workers, one leaf each: the same bits for one order of the workers, however the vector is cut."""
    runs = [(rank, rank + 1) for rank in range(links.world_size)]
    values.copy_(tree_all_reduce([values.clone()], runs, values, links.group))
