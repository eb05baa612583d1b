"""Boxes: the parts of tensors that files hold and workers need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Slice:
    """Where it begins in the whole tensor, and how long it is, along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        return cls((0,) * len(shape), shape)

    def overlap(self, other: Slice) -> Slice | None:
        """What both have; None where that is no number at all."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(stop - start for start, stop in zip(offsets, map(min, self._stops, other._stops), strict=True))
        return Slice(offsets, sizes) if all(size > 0 for size in sizes) else None

    def slices_in(self, outer: Slice) -> tuple[slice, ...]:
        """How to cut it out of a tensor that is `outer`."""
        starts = (own - outers for own, outers in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))
