"""Which slice of a length each worker has that is divided along the tensor axis."""

from __future__ import annotations


def slice_size(length: int, degree: int) -> int:
    """The largest slice, which all but the last workers have: DTensor's `Shard` cuts like torch.chunk."""
    return -(-length // degree)


def slice_of(length: int, degree: int, rank: int) -> tuple[int, int]:
    """The slice start … stop - 1 of `length` that is `rank`'s."""
    size = slice_size(length, degree)
    return min(rank * size, length), min((rank + 1) * size, length)


def every_worker_has_some(length: int, degree: int) -> bool:
    """Whether no slice is empty: of 5 over 4 workers they are 2, 2, 1 and 0 long."""
    return slice_size(length, degree) * (degree - 1) < length


def degrees_that_fit(length: int) -> str:
    """The degrees that divide `length` evenly, as words for a sentence: "1, 2, 3, 4, 6 or 12"."""
    fitting = [str(degree) for degree in range(1, length + 1) if length % degree == 0]
    return fitting[0] if len(fitting) == 1 else f"{', '.join(fitting[:-1])} or {fitting[-1]}"
