"""Events of a run, as its supervisor receives them."""

from __future__ import annotations

import queue
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerExited:
    """A worker of one team has ended; `Team` gives its ending."""

    team: int
    rank: int


@dataclass(frozen=True)
class TeamLost:
    """The connection to a node's agent has ended without being closed by the launcher."""

    team: int


@dataclass(frozen=True)
class Signalled:
    """This process got a signal that asks it to end."""

    number: int


Event = WorkerExited | TeamLost | Signalled
Events = queue.SimpleQueue[Event]
