"""`CheckpointRequest` and `CheckpointTimings`: what to save, and what saving it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from paceline.spec.cluster import DeviceKind
from paceline.spec.codec import NOT_NEGATIVE, JsonValue, at_least, between
from paceline.spec.job import MOST_SAMPLES


@dataclass(frozen=True)
class CheckpointRequest(JsonValue):
    """The state of a model and where to save it."""

    address: str
    """A folder that all nodes see, or an address such as s3://bucket/place; it is removed at the end."""
    num_parameters: int = at_least(1, 100_000_000)
    """Parameters in float32, each saved with Adam's two averages: 12 bytes a parameter."""
    num_rounds: int = between(1, MOST_SAMPLES, 5)
    """Checkpoints that are timed after a first one, which also has to find memory."""
    device_kind: DeviceKind | None = None
    """None: GPUs if there are any."""
    timeout_s: float = at_least(1, 600.0)
    """How long a call waits for a silent worker."""


@dataclass(frozen=True)
class CheckpointTimings(JsonValue):
    """The result of one benchmark: seconds of the slowest worker, one value per round."""

    request: CheckpointRequest
    world_size: int = field(metadata=NOT_NEGATIVE)
    device_kind: DeviceKind
    num_bytes: int = field(metadata=NOT_NEGATIVE)
    """The size of all files of a checkpoint."""
    first_stall_s: float = field(metadata=NOT_NEGATIVE)
    """How long training waits for the first checkpoint."""
    stalls_s: tuple[float, ...] = field(metadata=NOT_NEGATIVE)
    """How long training waits for each later checkpoint."""
    copies_s: tuple[float, ...] = field(metadata=NOT_NEGATIVE)
    """Seconds to copy the same state into allocated memory, a lower bound of the stall."""
    completes_s: tuple[float, ...] = field(metadata=NOT_NEGATIVE)
    """Seconds from the start until the checkpoint is complete and durable."""
    reads_s: tuple[float, ...] = field(metadata=NOT_NEGATIVE)
    """Seconds in which one worker reads the whole checkpoint and checks every byte, just after it was written."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def stall_s(self) -> float:
        return median(self.stalls_s)

    @property
    def copy_s(self) -> float:
        return median(self.copies_s)

    @property
    def complete_s(self) -> float:
        return median(self.completes_s)

    @property
    def read_s(self) -> float:
        return median(self.reads_s)

    @property
    def stall_over_copy(self) -> float:
        """The median of the ratios per round, which cancels drifts of the node's speed."""
        return median(stall / copy for stall, copy in zip(self.stalls_s, self.copies_s, strict=True))
