"""`Mesh`: the degree of every axis of parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.spec.codec import at_least, between

AxisName = Literal["pp", "dp", "fsdp", "tp"]
AXES: tuple[AxisName, ...] = ("pp", "dp", "fsdp", "tp")
"""The order in which ranks are laid out: neighbours in the last axis are neighbours in rank, so the axis that sends
most gets the fastest links (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 3.2)."""

DATA_AXES: tuple[AxisName, ...] = ("dp", "fsdp")
"""The axes among which the global batch is divided; workers along the others have the same samples."""

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


@dataclass(frozen=True)
class Mesh:
    """The degree of every axis; their product is the world size."""

    dp: int = at_least(1, 1)
    """Groups that each hold everything below once: they share the batch and sum their gradients."""
    fsdp: int = at_least(1, 1)
    """Workers that share the batch and each hold a shard of every parameter, gradient and optimizer state."""
    tp: int = at_least(1, 1)
    """Workers that each compute a slice of every layer."""
    pp: int = at_least(1, 1)
    """Pipeline stages, which each hold some layers and send activations to the next stage."""
    zero_stage: int = between(1, 3, 3)
    """What the fsdp axis shards: 1: optimizer state; 2: gradients too; 3: parameters too."""

    @property
    def num_workers(self) -> int:
        return math.prod(map(self.degree, AXES))

    @property
    def num_assignments(self) -> int:
        """How many ways the global batch is shared."""
        return self.dp * self.fsdp

    def degree(self, axis: AxisName) -> int:
        degree: int = getattr(self, axis)
        return degree

    def place(self, rank: int) -> dict[AxisName, int]:
        """The coordinates of a rank on all axes."""
        found: dict[AxisName, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.degree(axis))
        return found

    def share(self, rank: int) -> int:
        """The index of a rank's assignment of virtual shards."""
        place = self.place(rank)
        return place["dp"] * self.fsdp + place["fsdp"]

    def leads_assignment(self, rank: int) -> bool:
        """Whether a rank is the first of the ranks with the same samples."""
        return all(place == 0 for axis, place in self.place(rank).items() if axis not in DATA_AXES)

    @property
    def is_plain(self) -> bool:
        """Whether every worker holds a whole replica."""
        return self.num_workers == self.dp

    def __str__(self) -> str:
        data = "fsdp" if self.zero_stage == 3 else f"zero{self.zero_stage}:"
        named = (("dp", self.dp), (data, self.fsdp), ("tp", self.tp), ("pp", self.pp))
        return " x ".join(f"{axis}{degree}" for axis, degree in named if degree > 1) or "one device"
