"""The messages between the launcher and the agent on a node: one JSON object per line."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import LaunchError


@dataclass(frozen=True)
class AgentMessage:
    """Base class of all messages; subclasses are found by their names."""

    kinds: ClassVar[dict[str, type[AgentMessage]]] = {}

    def __init_subclass__(cls) -> None:
        AgentMessage.kinds[cls.__name__] = cls

    def encode(self) -> bytes:
        return json.dumps({"is": type(self).__name__} | dataclasses.asdict(self)).encode() + b"\n"


def decode(line: bytes) -> AgentMessage:
    """Decode one line.

    Raises:
        LaunchError: the line is no message, because something other than an agent wrote it.
    """
    try:
        mapping = json.loads(line)
        return AgentMessage.kinds[mapping.pop("is")](**mapping)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise LaunchError(
            f"Expected a message of a Paceline agent, got {line[:200].decode(errors='replace')!r}; look for a shell "
            "start-up file that prints, or another version of Paceline on that node."
        ) from None


# From the agent.


@dataclass(frozen=True)
class Hello(AgentMessage):
    """The first line of an agent."""

    hostname: str
    pid: int
    versions: dict[str, str]
    """The versions of paceline, torch and Python, which must be equal on all nodes."""
    node: dict[str, Any]
    """A `spec.Node` as a mapping."""


@dataclass(frozen=True)
class Listening(AgentMessage):
    """The answer to `Listen`: one open socket per address."""

    endpoints: list[dict[str, Any]]
    """`Endpoint`s as mappings."""


@dataclass(frozen=True)
class Reached(AgentMessage):
    """The answer to `TryEndpoints`: for every endpoint, the interface that reached it, or why none did."""

    interfaces: list[str | None]
    problems: list[str]


@dataclass(frozen=True)
class Refused(AgentMessage):
    """The agent cannot do what was requested; holds one sentence for the user."""

    sentence: str


@dataclass(frozen=True)
class Started(AgentMessage):
    """The workers run."""

    ranks: list[int]


@dataclass(frozen=True)
class WorkerStates(AgentMessage):
    """The agent's heartbeat, with the states of its workers."""

    workers: list[dict[str, Any]]
    """`WorkerState`s as mappings."""


@dataclass(frozen=True)
class OutputText(AgentMessage):
    """Lines of a worker's output for the launcher's terminal."""

    target_fd: int
    text: str


@dataclass(frozen=True)
class Exited(AgentMessage):
    """A worker has ended."""

    ending: dict[str, Any]
    """An `Ending` as a mapping; its `time` is the age in seconds, since clocks of nodes differ."""


@dataclass(frozen=True)
class RunEnded(AgentMessage):
    """All workers have ended and all their output has been sent."""


@dataclass(frozen=True)
class Stacks(AgentMessage):
    """The answer to `ShowStacks`."""

    by_rank: dict[str, str]


# From the launcher.


@dataclass(frozen=True)
class Ping(AgentMessage):
    """The launcher's heartbeat."""


@dataclass(frozen=True)
class Listen(AgentMessage):
    """Open a socket on every address of the node; answered by `Listening`."""

    interface: str | None


@dataclass(frozen=True)
class TryEndpoints(AgentMessage):
    """Try to connect to every endpoint; answered by `Reached`."""

    endpoints: list[dict[str, Any]]
    interface: str | None


@dataclass(frozen=True)
class Start(AgentMessage):
    """Start workers; answered by `Started` or `Refused`."""

    commands: list[dict[str, Any]]
    """`WorkerCommand`s as mappings."""
    options: dict[str, Any]
    """`LaunchOptions` as a mapping."""
    marker: str
    """The path of a file in the run folder that the node must see."""
    port: int | None
    """The port of the rendezvous, on the first node; None on the others."""


@dataclass(frozen=True)
class SignalWorkers(AgentMessage):
    """Send a signal, as `Team.signal` does; SIGKILL is answered by `RunEnded` if there are no workers left."""

    number: int
    ranks: list[int] | None = None
    """None: all."""


@dataclass(frozen=True)
class ShowStacks(AgentMessage):
    """Have workers dump the stacks of their threads."""

    ranks: list[int]
