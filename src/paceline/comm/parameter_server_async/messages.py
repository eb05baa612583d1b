"""Messages of `parameter_server_async` between workers, servers and the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.comm.fixed_tree import Block


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
    """A worker reports what became of its task."""

    task: Task
    arrived: bool
    """Whether all servers have all of its shards."""
    blocks: tuple[Block, ...]
    statistics: tuple[Tensor, ...]
    """The sum of the shards' statistics, one for every block."""


@dataclass(frozen=True)
class WorkRequest:
    """A worker asks the coordinator for work."""

    rank: int
    until: int
    """The worker wants shards of batches before this one."""
    most: int
    """How many shards it can take at once; 0: it only reports."""
    seen: int
    """The worker has the statistics of all batches before this one."""
    is_ahead: bool = False
    """The worker still computes: it is answered at once, with no task if there is none now."""
    wants_pause: bool = False
    """All workers should stop as soon as the batches that are begun are finished."""
    report: TaskReport | None = None


@dataclass(frozen=True)
class WorkReply:
    """The coordinator's answer. With neither a task nor the end of the batches, the worker asks again."""

    finished: int
    """All batches before this one are in the parameters, on every server."""
    pause_at: int | None = None
    """All workers stop when all batches before this one are finished, because some worker wanted it."""
    statistics: tuple[Tensor, ...] = ()
    """The sums over the shards of every batch from `WorkRequest.seen` to `finished` - 1."""
    task: Task | None = None
    lost_server: int | None = None
    is_given_up: bool = False
    """This worker could not be reached for a while, and other workers have its shards."""


@dataclass(frozen=True)
class NextWork:
    """The next work of a worker, or of all workers of its node."""

    statistics: tuple[tuple[int, Tensor], ...] = ()
    """The number of each batch that is finished now, and the sum of its statistics over the shards."""
    task: Task | None = None
    version: int | None = None
    """The parameters are those after so many updates; None: those from before the work."""
    is_last: bool = False
    """There is no more work."""


MESSAGES: tuple[type, ...] = (NextWork, ParameterRange, Task, TaskReport, WorkReply, WorkRequest)
"""All that may come from another worker."""
