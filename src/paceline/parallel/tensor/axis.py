"""One worker's place on the tensor axis, and who holds which part of a length that is shared out along it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """The workers that compute a part each of every layer."""

    mesh: DeviceMesh
    """One-dimensional."""

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def degree(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()


def part_size(length: int, degree: int) -> int:
    """The largest part, which all but the last workers have: DTensor's `Shard` cuts like torch.chunk."""
    return -(-length // degree)


def part(length: int, degree: int, rank: int) -> tuple[int, int]:
    """Positions start … stop - 1 of `length` that are `rank`'s."""
    size = part_size(length, degree)
    return min(rank * size, length), min((rank + 1) * size, length)


def everybody_has_some(length: int, degree: int) -> bool:
    """Whether no worker is left with nothing: 5 over 4 are 2, 2, 1 and none."""
    return part_size(length, degree) * (degree - 1) < length


def degrees_that_fit(length: int) -> str:
    """The degrees that divide `length` evenly, as words for a sentence: "1, 2, 3, 4, 6 or 12"."""
    fitting = [str(degree) for degree in range(1, length + 1) if length % degree == 0]
    return fitting[0] if len(fitting) == 1 else f"{', '.join(fitting[:-1])} or {fitting[-1]}"
