"""`RunStatus`: what the workers of a run that trains now were doing a moment ago."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from paceline.spec.codec import NOT_NEGATIVE, JsonValue

STATUS_FILE = "workers.json"
"""The file name of `RunStatus` in a run folder."""


@dataclass(frozen=True)
class WorkerStatus:
    """One worker."""

    rank: int = field(metadata=NOT_NEGATIVE)
    node: str
    """Its hostname; empty: the launcher's own."""
    pid: int = field(metadata=NOT_NEGATIVE)
    step: int | None
    """Optimizer updates done; None for a program without a `Run`."""
    doing: str
    """What it was doing, as a phrase."""
    is_waiting: bool
    """Whether it was inside a collective."""
    memory_bytes: int | None = None
    """Memory of the process that lies in RAM."""


@dataclass(frozen=True)
class GpuUse:
    """What a process uses of the GPU that it computes on."""

    index: int
    memory_bytes: int | None
    """GPU memory of the process."""
    busy: float | None
    """The fraction of the last moments in which the GPU computed, for any process."""


@dataclass(frozen=True)
class RunStatus(JsonValue):
    """All workers, at one time."""

    json_indent: ClassVar[int | None] = None

    time: float = field(metadata=NOT_NEGATIVE)
    """Seconds since the epoch."""
    workers: tuple[WorkerStatus, ...]
    """The status of each worker, by rank."""
