"""A worker's batch: its virtual shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

Apply = Callable[[Callable[[Any], Any], tuple[Any, ...]], tuple[Any, ...]]
"""apply(function, shards): what a function returns for each shard."""


def apply_to_each(function: Callable[[Any], Any], shards: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a function returns for each shard."""
    return tuple(function(shard) for shard in shards)


@dataclass(frozen=True)
class Batch:
    """The virtual shards of one global batch that this worker computes, each collated by itself.

    How many they are depends on the number of workers; what is in each of them does not. The loss function is called
    with one after the other.
    """

    shards: tuple[Any, ...]
    """The content of each of this worker's shards."""
    sizes: tuple[int, ...]
    """How many samples are in each of them."""
    apply: Apply = field(default=apply_to_each, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what another process gets, belongs to no run."""
        return Batch, (self.shards, self.sizes)

    @property
    def num_samples(self) -> int:
        return sum(self.sizes)

    def __len__(self) -> int:
        """The number of shards."""
        return len(self.shards)

    def __iter__(self) -> Iterator[Any]:
        """The content of one shard after the other."""
        return iter(self.shards)

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """A batch with `function` applied to each shard's content; what it draws is the shard's own."""
        return replace(self, shards=self.apply(function, self.shards))
