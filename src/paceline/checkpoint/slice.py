"""Slices of tensors: what files hold, and what workers need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Slice:
    """Where a slice begins in the whole tensor, and its size, along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        return cls((0,) * len(shape), shape)

    def overlap(self, other: Slice) -> Slice | None:
        """The intersection of both slices; None where it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(stop - start for start, stop in zip(offsets, map(min, self._stops, other._stops), strict=True))
        return Slice(offsets, sizes) if all(size > 0 for size in sizes) else None

    def slices_in(self, outer: Slice) -> tuple[slice, ...]:
        """The index that takes this slice out of a tensor that holds the slice `outer`."""
        starts = (own - outers for own, outers in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))
