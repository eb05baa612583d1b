"""Sums in one fixed order, whoever holds the summands: the arithmetic behind `parity = "bitwise"`.

Floating-point addition does not associate, so a sum is reproducible only if its order is. Here the order is a
binary tree over *leaves* (the virtual shards), never over workers:

    tree[a, b) = leaf a                                         if b - a = 1
                 tree[a, a + p) + tree[a + p, b)                else, p the largest power of two below b - a

A worker owns a run of neighbouring leaves. It adds whatever complete aligned blocks [k 2^j, (k + 1) 2^j) its
run contains; each of them is a node of the tree. Those of neighbouring workers are added in the same way, and the
blocks of all workers tile the leaves, so a fixed order remains for the rest of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor

Block = tuple[int, int]
"""First leaf and number of leaves (a power of two) of one aligned block."""
Leaves = tuple[int, int]
"""The leaves start … stop - 1."""
Value = TypeVar("Value")


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


def blocks_of_runs(runs: Iterable[Leaves]) -> list[Block]:
    """The fewest aligned blocks that tile all of these runs, in order."""
    joined: list[Leaves] = []
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return [block for run in joined for block in aligned_blocks(*run)]


class TreeSum(Generic[Value]):
    """Adds leaves, or sums of blocks, as they come; holds at most one partial sum per power of two of a run.

    They are pushed in ascending order and owned from then on: tensors are added in place.
    """

    def __init__(self, first_leaf: int = 0, add: Callable[[Any, Any], Any] = Tensor.add_) -> None:
        """`add` returns the sum of two neighbours; it need not commute."""
        self._next = first_leaf
        self._add = add
        self.sums: list[tuple[Block, Value]] = []
        """The blocks whose sums are not added up yet, in order, with these."""

    def push(self, leaf: Value) -> list[Value]:
        """Add the next leaf, of the shape of all leaves. Returns the leaves in which no sum is kept any more."""
        self._next += 1
        return self.push_block((self._next - 1, 1), leaf)

    def push_block(self, block: Block, total: Value) -> list[Value]:
        """Add the sum of an aligned block, of a leaf's shape. Returns the tensors in which no sum is kept any more."""
        free = []
        while self.sums:
            (start, size), left = self.sums[-1]
            if size != block[1] or start % (2 * size) or start + size != block[0]:
                break
            self.sums.pop()
            free.append(total)
            block, total = (start, 2 * size), self._add(left, total)
        self.sums.append((block, total))
        return free

    def root(self) -> Value:
        """The sum of all that was pushed, one leaf at least."""
        *rest, (_, total) = self.sums
        for _, left in reversed(rest):
            total = self._add(left, total)
        return total

    @property
    def partials(self) -> list[Value]:
        return [partial for _, partial in self.sums]


def finish_tree(blocks: Mapping[Block, Tensor], num_leaves: int) -> Tensor:
    """The root of the tree over `num_leaves` leaves from the sums of blocks that tile it, all of one shape, in which it
    is returned; may overwrite them."""

    def node(start: int, stop: int) -> Tensor:
        ready = blocks.get((start, stop - start))
        if ready is not None:
            return ready
        half = 1 << ((stop - start - 1).bit_length() - 1)
        return node(start, start + half).add_(node(start + half, stop))

    return node(0, num_leaves)
