"""What workers, servers and the coordinator of `parameter_server_async` tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.comm.tree_exact import Block


@dataclass(frozen=True)
class Task:
    """Neighbouring shards start … stop - 1 of one global batch, leased to one worker (or one node)."""

    lease: int
    batch: int
    start: int
    stop: int

    @property
    def shards(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True)
class ParameterRange:
    """Elements start … stop - 1 of parameter number `parameter`, flattened."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True)
class TaskReport:
    """What became of a task."""

    task: Task
    arrived: bool
    """All servers have all of its shards."""
    blocks: tuple[Block, ...]
    statistics: tuple[Tensor, ...]
    """The sum of the shards' statistics, one for every block."""


@dataclass(frozen=True)
class WorkRequest:
    """What a worker says when it asks for work."""

    rank: int
    until: int
    """It wants shards of batches before this one."""
    most: int
    """It can take so many at once."""
    seen: int
    """It knows of all batches before this one that they are finished."""
    wants_rest: bool = False
    """All should meet as soon as what is begun is done."""
    report: TaskReport | None = None


@dataclass(frozen=True)
class WorkReply:
    """What it hears. Neither a task nor the end of its batches: ask again."""

    finished: int
    """All batches before this one are in the parameters, on every server."""
    rest_at: int | None = None
    """With all batches before this one finished, all meet: somebody wanted it."""
    statistics: tuple[Tensor, ...] = ()
    """Of every batch from `WorkRequest.seen` to `finished` - 1: the sum over its shards."""
    task: Task | None = None
    lost_server: int | None = None
    is_given_up: bool = False
    """The worker itself could not be reached for a while; others have its work."""


MESSAGES: tuple[type, ...] = (ParameterRange, Task, TaskReport, WorkReply, WorkRequest)
"""All that may come from another worker."""
