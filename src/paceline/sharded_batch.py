"""A worker's batch whose virtual shards were collated one by one, as they have to be where collating pads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from paceline.errors import ModelError

Apply = Callable[[Callable[[Any], Any], tuple[Any, ...]], tuple[Any, ...]]
"""apply(function, shards): what a function returns for each shard."""


def apply_to_each(function: Callable[[Any], Any], shards: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a function returns for each shard."""
    return tuple(function(shard) for shard in shards)


@dataclass(frozen=True)
class ShardedBatch:
    """What a collate function made of each virtual shard's samples.

    How far samples are padded depends on which are collated together. A virtual shard is the same on any number of
    workers, a worker's whole batch is not. So the loss function is called with one shard's content after the other,
    each exactly as the collate function returned it.
    """

    shards: tuple[Any, ...]
    """The content of each of this worker's shards."""
    sizes: tuple[int, ...]
    """How many samples are in each of them."""
    apply: Apply = field(default=apply_to_each, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what another process gets, belongs to no run."""
        return ShardedBatch, (self.shards, self.sizes)

    @property
    def num_samples(self) -> int:
        return sum(self.sizes)

    def map(self, function: Callable[[Any], Any]) -> ShardedBatch:
        """A batch with `function` applied to each shard's content; what it draws is the shard's own."""
        return replace(self, shards=self.apply(function, self.shards))

    def beginning_at(self, start: int) -> Any:
        """The content of the shard whose first sample is the batch's sample `start`."""
        first = 0
        for shard, size in zip(self.shards, self.sizes, strict=True):
            if first == start:
                return shard
            first += size
        raise AssertionError(f"no shard of {self.sizes} begins at sample {start}")

    def __getitem__(self, key: Any) -> NoReturn:
        raise self._refused(f"[{key!r}]")

    def __iter__(self) -> NoReturn:
        raise self._refused(" as if it were one collated batch")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Python and notebooks ask whether there are such
            raise AttributeError(name)
        raise self._refused(f".{name}")

    def _refused(self, use: str) -> ModelError:
        return ModelError(
            "A batch made by a collate function is one collated batch for each virtual shard, but the script uses it"
            f"{use}; do that in the loss function, which gets one shard after the other, or by batch.map(function)."
        )
