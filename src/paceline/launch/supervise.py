"""Watches a run until it ends: the first failure, a hang, a lost node or a signal ends it for all workers."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.launch.failures import Ending
from paceline.launch.hang import Hang, WorkerState, find_hang, interval_s
from paceline.launch.team import Events, LaunchOptions, Signalled, Team, TeamLost, WorkerExited
from paceline.regular_files import run_file_mode
from paceline.spec.run_status import STATUS_FILE, RunStatus, WorkerStatus

CULPRIT_WAIT_S = 1.0
"""How long to wait for the cause: a worker may report that it lost a peer before the peer reports why it ended."""

OTHERS_WAIT_S = 3.0
"""How long an elastic run waits to see whether all workers raise the same exception, a fault of the program."""

SETTLE_S = 0.5
"""How long workers of an elastic run may take to notice that a peer is gone. Most do in milliseconds, and save a
checkpoint; workers that still wait then would wait for ever."""


@dataclass(frozen=True)
class NodeLoss:
    """A node whose agent no longer answers; its workers are lost with it."""

    hostname: str
    ranks: tuple[int, ...]
    time: float
    """Seconds since the epoch when the loss was noticed."""
    silent_s: float | None
    """How long the node had been silent; None: the connection was closed at the other end."""
    was_stopping: bool = False
    """Whether the run was already being ended, so that the loss is not the cause."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, before diagnosis."""

    endings: tuple[Ending, ...] = ()
    stopped_at: float = float("inf")
    """Seconds since the epoch when all workers were asked to end; infinite if they were not."""
    interrupted_by: int | None = None
    """The number of the signal that ended the run."""
    signalled: int | None = None
    """The number of the first signal that asked for the end of the run, also after a failure."""
    ended_to_grow: bool = False
    """Whether the run was ended to restart with more workers."""
    trained_at: float | None = None
    """Seconds since the epoch when the first update was done."""
    hang: Hang | None = None
    hang_at: float = float("inf")
    """Seconds since the epoch when the hang was found."""
    states: tuple[WorkerState, ...] = ()
    """The states of all workers when the hang was found, or when the first failure was seen."""
    stacks: tuple[tuple[int, str], ...] = ()
    losses: tuple[NodeLoss, ...] = ()


class Supervisor:
    """Waits for the workers of all teams; ends all of them when one fails."""

    def __init__(
        self,
        teams: Sequence[Team],
        events: Events,
        options: LaunchOptions,
        *,
        could_grow: Callable[[], bool] = lambda: False,
    ) -> None:
        """Watch workers that have been started.

        Args:
            could_grow: whether there is a reason to start again with more workers.
        """
        self._teams = list(teams)
        """The teams that are not lost."""
        self._events = events
        self._grace_s = options.grace_s
        self._save_s = options.grace_s if options.save_s is None else options.save_s
        self._is_elastic = options.is_elastic
        self._could_grow = could_grow
        self._run_dir = options.run_dir
        self.outcome = Outcome()
        self._stopped_at = float("inf")
        """When the run was stopped, in seconds on the monotonic clock; infinite before."""
        self._interval_s = interval_s(options.hang_timeout_s)
        # Heartbeat, agent and launcher each see a state up to one interval late, but a hang must be reported within
        # its bound.
        self._bound_s = options.hang_timeout_s - 4 * self._interval_s
        self._deadline: float | None = None
        """On the monotonic clock: when to send SIGTERM, or after it SIGKILL."""
        self._next_look = time.monotonic() + self._interval_s
        # What workers of other nodes do is known some intervals later.
        self._settle_s = SETTLE_S + (2 * self._interval_s if any(team.hostname for team in teams) else 0.0)

    def wait(self) -> None:
        """Return when every worker has ended, or is lost with its node."""
        while any(team.running for team in self._teams):
            try:
                event = self._events.get(timeout=self._seconds_left())
            except queue.Empty:
                self._on_timeout()
                continue
            match event:
                case WorkerExited(team, rank):
                    self._note_exit(team, rank)
                case TeamLost(team):
                    self._lose(team, silent_s=None)
                case Signalled(signal.SIGUSR1):
                    self._signal(signal.SIGUSR1)
                case Signalled(number):
                    hurries = self.outcome.signalled is not None or (self._is_stopping and not self._is_elastic)
                    self._note_signal(number)
                    if hurries:
                        self._kill()
                    elif not self._is_stopping:
                        self._ask_to_end(self._grace_s if number == signal.SIGINT else self._save_s)

    def drain(self) -> None:
        """Note the remaining events: too late to end workers, but not to act on or to report."""
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, Signalled) and event.number != signal.SIGUSR1:
                self._note_signal(event.number)

    def _note(self, **changes: Any) -> None:
        self.outcome = replace(self.outcome, **changes)

    @property
    def _is_stopping(self) -> bool:
        return self.outcome.stopped_at != float("inf")

    @property
    def _has_time_to_save(self) -> bool:
        return time.monotonic() < self._stopped_at + self._save_s

    def _seconds_left(self) -> float:
        due = self._next_look if self._deadline is None else min(self._next_look, self._deadline)
        return max(0.0, due - time.monotonic())

    def _on_timeout(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            if not self._is_stopping:
                self._end()
            elif any(state.is_saving for state in self._all_states()) and self._has_time_to_save:
                self._deadline = now + self._settle_s
            else:
                self._kill()
        if now >= self._next_look:
            self._next_look = now + self._interval_s
            self._look()

    def _look(self) -> None:
        for team in tuple(self._teams):
            silent_s = team.silent_s()
            if silent_s > self._bound_s:
                self._lose(team, silent_s)
        for team in self._teams:
            team.prepare_standby()
        states = self._all_states()
        _write_status(self._run_dir, states)
        if self._is_stopping or self._deadline is not None:
            return
        for state in states:
            self._note_training(state.trained_s)
        hang = find_hang(states, self._bound_s)
        if hang is not None:
            if self._is_on_silent_node(hang.culprits):
                return  # it will be lost, or heard from again, within the bound
            self._note(hang=hang, states=tuple(states), hang_at=time.time())
            if hang.kind != "stopped":  # a stopped worker cannot dump its stacks
                self._note(stacks=tuple(stack for team in self._teams for stack in team.stacks(hang.culprits).items()))
            self._end(hang.culprits)
        # A run without a step since its start would only lose time.
        elif states and all(state.trained_s is not None for state in states) and self._could_grow():
            self._note(ended_to_grow=True)
            self._ask_to_end(self._save_s)

    def _is_on_silent_node(self, ranks: Sequence[int]) -> bool:
        """Whether one of these workers is on a node that has missed two heartbeats, so that its state is not known."""
        return any(team.silent_s() > 2 * self._interval_s for team in self._teams if set(team.running) & set(ranks))

    def _all_states(self) -> list[WorkerState]:
        states = [replace(state, hostname=team.hostname) for team in self._teams for state in team.states()]
        return sorted(states, key=lambda state: state.rank)

    def _note_exit(self, team: Team, rank: int) -> None:
        if team not in self._teams:
            return
        ending = replace(team.collect(rank), hostname=team.hostname)
        if ending.failed and not self.outcome.states:
            self._note(states=tuple(self._all_states()))
        self._note(endings=(*self.outcome.endings, ending))
        self._note_training(ending.trained_s)
        if not ending.failed or self._is_stopping:
            return
        if ending.is_consequence:
            self._wait_at_most(CULPRIT_WAIT_S)
        elif ending.exit_code > 0 and self._is_elastic and not self._all_wait():
            self._wait_at_most(OTHERS_WAIT_S)
        else:
            self._end()

    def _wait_at_most(self, seconds: float) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + seconds

    def _all_wait(self) -> bool:
        """Whether all running workers wait for others, so that none of them will raise an exception of its own."""
        states = self._all_states()
        return bool(states) and all(state.inside_s is not None for state in states)

    def _note_training(self, trained_s: float | None) -> None:
        if trained_s is not None:
            self._note(trained_at=min(time.time() - trained_s, self.outcome.trained_at or float("inf")))

    def _lose(self, team: Team, silent_s: float | None) -> None:
        if team not in self._teams:
            return
        self._teams.remove(team)
        ranks = tuple(team.running)
        loss = NodeLoss(team.hostname, ranks, time.time(), silent_s, self._is_stopping)
        self._note(losses=(*self.outcome.losses, loss))
        if ranks and not self._is_stopping:
            self._note(states=tuple(self._all_states()))
            self._end()

    def _note_signal(self, number: int) -> None:
        # A failure before the signal explains better why the run ended.
        so_far = self.outcome
        if so_far.signalled is None:
            has_failed = any(ending.failed for ending in so_far.endings) or so_far.losses or so_far.hang
            self._note(signalled=number, interrupted_by=None if has_failed else number)

    def _end(self, hanging: Sequence[int] = ()) -> None:
        """End the run after a failure; where it will go on, kill only those that hang."""
        if not self._is_elastic:
            self._ask_to_end(self._grace_s)
            return
        self._note_stop()
        self._deadline = time.monotonic() + self._settle_s
        for team in self._teams:
            if ranks := [rank for rank in team.running if rank in hanging]:
                team.signal(signal.SIGKILL, ranks)

    def _note_stop(self) -> None:
        if not self._is_stopping:  # the first time counts
            self._note(stopped_at=time.time())
            self._stopped_at = time.monotonic()

    def _ask_to_end(self, grace_s: float) -> None:
        self._note_stop()
        self._deadline = time.monotonic() + grace_s
        self._signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._note_stop()
        self._deadline = None
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for team in self._teams:
            team.signal(number)


def _write_status(run_dir: Path, states: Sequence[WorkerState]) -> None:
    """Write workers.json, for those who watch a run; a file that cannot be written is left as it is."""
    workers = (
        WorkerStatus(
            rank=state.rank,
            node=state.hostname,
            pid=state.pid,
            step=state.step,
            doing=state.doing,
            is_waiting=state.inside_s is not None,
            memory_bytes=state.memory_bytes,
            processor_s=state.processor_s,
        )
        for state in states
    )
    with contextlib.suppress(OSError):
        RunStatus(time.time(), tuple(workers)).save(run_dir / STATUS_FILE, run_file_mode())
