"""The workers of another node, seen through the agent there: JSON lines over the pipes of whatever reaches the node."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from paceline.errors import LaunchError, reason_of
from paceline.launch import messages
from paceline.launch.commands import Rendezvous, WorkerCommand
from paceline.launch.endpoints import TRY_TIMEOUT_S, Endpoint
from paceline.launch.failures import Ending
from paceline.launch.forking import LOAD_WAIT_S
from paceline.launch.hang import WatchClock, WorkerState
from paceline.launch.messages import AgentMessage
from paceline.launch.output import show_here
from paceline.launch.team import HANG_TIMEOUT_S, STACKS_WAIT_S, Event, LaunchOptions, TeamLost, WorkerExited, with_age
from paceline.spec.codec import from_mapping

OPEN_TIMEOUT_S = 60.0
"""Timeout for an agent's first message: login, start of a container and an interpreter, hardware detection."""
ANSWER_TIMEOUT_S = 20.0
START_TIMEOUT_S = ANSWER_TIMEOUT_S + LOAD_WAIT_S
CLOSE_TIMEOUT_S = 2.0
STDERR_TAIL_LINES = 20

AnyMessage = TypeVar("AnyMessage", bound=AgentMessage)


@dataclass(frozen=True)
class NodeAccess:
    """How to run a program on a node: by a local process whose standard streams are the program's."""

    hostname: str
    argv: Callable[[Sequence[str]], Sequence[str]]
    """Maps the program to the local command line."""
    explain: Callable[[int, str], str | None] = lambda _exit_code, _stderr: None
    """Maps exit code and standard error to a sentence for the user; None if it knows none."""
    python: str = sys.executable
    """The node's Python interpreter, in which Paceline is installed."""

    def run(self, program: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a program on the node until it ends; raises `OSError` or `subprocess.TimeoutExpired`."""
        return subprocess.run(
            self.argv(program),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )

    def succeeds(self, program: Sequence[str], timeout_s: float) -> bool:
        """Whether a program can be run on the node and ends without an error."""
        try:
            return self.run(program, timeout_s).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


class RemoteTeam:
    """The connection to one node's agent; it may serve several runs."""

    def __init__(self, access: NodeAccess) -> None:
        self.hostname = access.hostname
        self.access = access
        self.hello: messages.Hello
        """The agent's first message, once `greet` has read it."""
        self._notify: Callable[[Event], None] | None = None
        self._running: set[int] = set()
        self._endings: dict[int, Ending] = {}
        self._states: list[WorkerState] = []
        self._answers: queue.SimpleQueue[AgentMessage | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._is_disconnected = False
        self._has_refused = False
        self._has_ended = threading.Event()
        self._last_message_at = time.monotonic()
        self._clock = WatchClock(HANG_TIMEOUT_S)
        self._send_lock = threading.Lock()
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_TAIL_LINES)
        argv = access.argv([access.python, "-m", "paceline", "agent"])
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise LaunchError(f"{argv[0]} cannot be started to reach {self.hostname}: {reason_of(error)}.") from error
        self._threads = [
            threading.Thread(target=task, name=f"{self.hostname}-{task.__name__.strip('_')}", daemon=True)
            for task in (self._read, self._relay_stderr, self._ping)
        ]
        for thread in self._threads:
            thread.start()

    def greet(self) -> None:
        """Read the agent's first message; raises as `answer` does."""
        self.hello = self.answer(messages.Hello, OPEN_TIMEOUT_S)

    def send(self, message: AgentMessage) -> None:
        """Send a message; a message on a closed connection is dropped."""
        assert self._process.stdin is not None
        with self._send_lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(message.encode())
            self._process.stdin.flush()

    def answer(self, kind: type[AnyMessage], timeout_s: float = ANSWER_TIMEOUT_S) -> AnyMessage:
        """The agent's next answer of this kind; late answers of other kinds are skipped.

        Raises:
            LaunchError: the agent refused, has ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise LaunchError(
                    f"{self.hostname} has not answered within {timeout_s:.0f} s; is it overloaded?"
                ) from None
            if message is None:
                raise LaunchError(self._end_sentence())
            if isinstance(message, messages.Refused):
                self._has_refused = True
                raise LaunchError(f"{self.hostname}: {message.sentence}")
            if isinstance(message, kind):
                return message

    def ask(self, question: AgentMessage, kind: type[AnyMessage], timeout_s: float = ANSWER_TIMEOUT_S) -> AnyMessage:
        """Send a message and wait for the answer; raises as `answer` does."""
        self.send(question)
        return self.answer(kind, timeout_s)

    def begin_run(
        self,
        commands: Sequence[WorkerCommand],
        options: LaunchOptions,
        notify: Callable[[Event], None],
        *,
        marker: str,
        port: int | None,
    ) -> None:
        """Ask for the node's workers; `await_start` returns when they have been started.

        Args:
            notify: receives events; called from any thread.
            marker: a file in the run folder, by which the node recognises the folder.
            port: the port of the rendezvous if it is on this node.
        """
        self._endings.clear()
        self._states = []
        self._has_ended.clear()
        self._clock = WatchClock(options.hang_timeout_s)
        self._notify = notify
        start = messages.Start(
            commands=[asdict(command) for command in commands],
            options=asdict(options) | {"run_dir": str(options.run_dir.absolute())},
            marker=marker,
            port=port,
        )
        self.send(start)

    def await_start(self) -> None:
        """Wait until the agent has started the workers; nodes that load torch first do so at the same time.

        Raises:
            LaunchError: the agent cannot start them, or does not see the run folder.
        """
        self._running = set(self.answer(messages.Started, START_TIMEOUT_S).ranks)

    def end_run(self) -> None:
        """Wait until the agent has released the run's workers, killing those still running."""
        if self._notify is None:
            return
        self.send(messages.SignalWorkers(signal.SIGKILL))
        self._has_ended.wait(self._last_word_timeout_s)
        self._notify = None
        self._running.clear()

    @property
    def running(self) -> Sequence[int]:
        return tuple(sorted(self._running))

    def collect(self, rank: int) -> Ending:
        self._running.discard(rank)
        return self._endings[rank]

    def states(self) -> list[WorkerState]:
        return [state for state in self._states if state.rank in self._running]

    def silent_s(self) -> float:
        return self._clock.watched_s(time.monotonic() - self._last_message_at)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        wanted = [rank for rank in ranks if rank in self._running]
        if not wanted:
            return {}
        try:
            answer = self.ask(messages.ShowStacks(wanted), messages.Stacks, STACKS_WAIT_S + 1.0)
        except LaunchError:
            return {}
        return {int(rank): text for rank, text in answer.by_rank.items()}

    def prepare_standby(self) -> None:
        """The agent does."""

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        self.send(messages.SignalWorkers(number, None if ranks is None else list(ranks)))

    @property
    def is_gone(self) -> bool:
        """Whether the connection is closed, has been silent for several heartbeats, or brought only a refusal."""
        return self._is_disconnected or self._has_refused or self._is_silent

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # ends the agent, which ends its workers
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._last_word_timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    @property
    def _is_silent(self) -> bool:
        return self.silent_s() >= 4 * self._clock.interval_s

    @property
    def _last_word_timeout_s(self) -> float:
        return 0.0 if self._is_silent else CLOSE_TIMEOUT_S

    def _end_sentence(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)
        self._threads[1].join(CLOSE_TIMEOUT_S)
        exit_code, stderr = self._process.returncode, "\n".join(self._stderr_tail)
        explained = self.access.explain(exit_code or 0, stderr)
        if explained:
            return explained
        last = f": {self._stderr_tail[-1]}" if self._stderr_tail else ""
        return f"No agent runs on {self.hostname} (exit code {exit_code}){last}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = messages.decode(line)
            except LaunchError as error:
                message = messages.Refused(str(error))
            self._last_message_at = time.monotonic()
            self._take(message)
        self._is_disconnected = True
        self._has_ended.set()
        self._answers.put(None)
        if self._notify is not None and not self._closing.is_set():
            self._notify(TeamLost(self))

    def _take(self, message: AgentMessage) -> None:
        match message:
            case messages.WorkerStates(workers):
                self._states = [WorkerState(**worker) for worker in workers]
            case messages.OutputText(target_fd, text):
                show_here(target_fd, text.encode())
            case messages.Exited(mapping):
                ending = with_age(from_mapping(Ending, mapping), time.time())
                self._endings[ending.rank] = ending
                if self._notify is not None:
                    self._notify(WorkerExited(self, ending.rank))
            case messages.RunEnded():
                self._has_ended.set()
            case _:
                self._answers.put(message)

    def _relay_stderr(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._stderr_tail.append(line.decode(errors="replace").rstrip())

    def _ping(self) -> None:
        while self._process.poll() is None:
            self._clock.look()
            self.send(messages.Ping())
            if self._closing.wait(self._clock.interval_s):
                return


@contextlib.contextmanager
def open_nodes(accesses: Sequence[NodeAccess]) -> Iterator[list[RemoteTeam]]:
    """Start agents on all nodes and read their first messages; the agents end with the block.

    Raises:
        LaunchError: a node cannot be reached, or its versions differ from those of the first.
    """
    with contextlib.ExitStack() as at_end:
        teams = []
        for access in accesses:
            teams.append(at_end.enter_context(contextlib.closing(RemoteTeam(access))))
        for team in teams:  # after all have been started
            team.greet()
            check_versions(teams[0], team)
        yield teams


def check_versions(first: RemoteTeam, other: RemoteTeam) -> None:
    """Compare the versions in two first messages; raises `LaunchError` if one differs."""
    for name, version in first.hello.versions.items():
        if other.hello.versions.get(name) != version:
            raise LaunchError(
                f"{other.hostname} has {name} {other.hello.versions.get(name, '(none)')}, but {first.hostname} has "
                f"{version}; install the same version on all nodes, or use one container image."
            )


def arrange_rendezvous(teams: Sequence[RemoteTeam], interface: str | None) -> Rendezvous:
    """Find an address of the first node that all other nodes reach, by connecting; the fastest if there are several.

    Workers use the interfaces that lead there, and those that lead to other addresses of the first node as fast.

    Args:
        interface: the one to use, or several as "a,b", the first of which is for the rendezvous; None: any.

    Raises:
        LaunchError: there is none.
    """
    first, *others = teams
    alone = None if others else "lo"
    named = None if interface is None else interface.split(",")[0]
    listening = first.ask(messages.Listen(named or alone), messages.Listening)
    endpoints = [Endpoint(**endpoint) for endpoint in listening.endpoints]
    for team in others:
        team.send(messages.TryEndpoints(listening.endpoints, named))
    reached = [team.answer(messages.Reached, ANSWER_TIMEOUT_S + TRY_TIMEOUT_S) for team in others]
    open_to_all = [n for n in range(len(endpoints)) if all(answer.interfaces[n] is not None for answer in reached)]
    if not open_to_all:
        raise LaunchError(_no_endpoint_sentence(first.hostname, endpoints, [team.hostname for team in others], reached))
    best = max(open_to_all, key=lambda n: endpoints[n].bits_per_s)
    endpoint = endpoints[best]
    host = f"[{endpoint.address}]" if ":" in endpoint.address else endpoint.address
    ways = [(endpoints[n].interface, *(str(answer.interfaces[n]) for answer in reached)) for n in open_to_all]
    rates = [endpoints[n].bits_per_s for n in open_to_all]
    interfaces = (interface,) * len(teams) if interface and "," in interface else side_by_side(ways, rates)
    torch_store = endpoint.address, endpoint.torch_port
    return Rendezvous(f"tcp://{host}:{endpoint.port}", interfaces, endpoint.port, torch_store)


def side_by_side(ways: Sequence[Sequence[str]], bits_per_s: Sequence[float]) -> tuple[str, ...]:
    """The interfaces for workers on each node, as "a,b" where several ways of the greatest known speed have no
    interface in common: messages are cut into equal parts, so that a slower one would hold up the others.

    Args:
        ways: to each address of the first node, the interface of every node that leads there.
        bits_per_s: of each way; 0: not known.
    """
    fastest = max(bits_per_s)
    chosen = [ways[bits_per_s.index(fastest)]]
    for way, rate in zip(ways, bits_per_s, strict=True):
        if rate == fastest > 0 and not any(
            one == other for taken in chosen for one, other in zip(way, taken, strict=True)
        ):
            chosen.append(way)
    return tuple(",".join(names) for names in zip(*chosen, strict=True))


def _no_endpoint_sentence(
    first: str, endpoints: Sequence[Endpoint], others: Sequence[str], reached: Sequence[messages.Reached]
) -> str:
    if not endpoints:
        return f"{first} has no network address that other nodes could reach; is its interface up?"
    for name, answer in zip(others, reached, strict=True):
        if not any(answer.interfaces):
            tried = ", ".join(
                f"{endpoint.address} on {endpoint.interface} ({problem})"
                for endpoint, problem in zip(endpoints, answer.problems, strict=True)
            )
            return (
                f"{name} reaches no address of {first}: {tried}; open the firewall between the nodes, or name the "
                "network with interface = NAME."
            )
    return f"No address of {first} is reached by all other nodes; name a common network with interface = NAME."
