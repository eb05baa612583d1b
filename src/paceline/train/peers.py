"""Workers of a run watch each other over the run's store, under every launcher: they find hangs, and tell of failures.

Every worker posts what it does once a second. The first two workers of each node read what all have posted. A hang is
reported by one on the node of the worker that the others wait for, which it ends then, so that the others go on: they
lose the connection to it, save what is whole, and end.

NCCL does not notice a lost connection: its kernels wait on the GPU for messages of a process that has ended, and the
program waits for the GPU. So workers on the node of one that has ended tell all of them, and each aborts its
communicators. What these leave in memory means nothing, so no update may stand behind them in the GPU's queue.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, and not in its list

from paceline import env
from paceline.diagnosis.failures import (
    HANG_TIMEOUT_S,
    STALE_S,
    Failure,
    FailureReport,
    Hang,
    WorkerState,
    describe_hang,
    failure_path,
    find_hang,
    place_in,
    raised_in,
    report_of,
)
from paceline.errors import PacelineError, PeerLost, printable, shortened
from paceline.files import replace_text, run_file_mode
from paceline.heartbeat import Vitals, own_file, read_vitals
from paceline.spec.record import STATUS_FILE, RunStatus, WorkerStatus

STORE_TIMEOUT_S = 10.0
STACKS_S = 1.0
"""How long a worker may take to dump its stacks; Python's own handler needs milliseconds."""
OTHERS_S = STALE_S + 3.0
"""How long to wait for who knows more: the worker that failed, or one on the node of a hanging worker."""
SILENT_S = 3 * STALE_S
"""A node from which nobody has posted for so long is lost."""
NOTICE_S = 4.0
"""The maximum wait for the loss behind an error of NCCL's, and for its abort."""
OVER_S = 60.0
"""How long a worker that has ended its run waits for those that are still busy in their scripts."""
_OF_TORCH = "torch.distributed."
"""Begins the name of a collective that was found in a stack."""


class WatchClock:
    """Measures durations, counting only the time in which this process, the observer, was running itself.

    A worker that is stopped together with the others (SIGSTOP to all, a paused container, gang scheduling) must not
    report the pause as a hang afterwards.
    """

    def __init__(self, hang_timeout_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Start measuring; `watched_s` must be called every `interval_s` seconds."""
        self._now = now
        self.interval_s = min(1.0, hang_timeout_s / 10)
        """How often a worker posts its state, and looks at those of others."""
        self._looked_at = now()
        self._pauses: deque[tuple[float, float]] = deque(maxlen=100)

    def watched_s(self, seconds: float) -> float:
        """The number of the last `seconds` in which this process ran."""
        looked_at, self._looked_at = self._looked_at, self._now()
        if self._looked_at - looked_at > 2 * self.interval_s:
            self._pauses.append((looked_at + self.interval_s, self._looked_at))
        began = self._looked_at - seconds
        return seconds - sum(end - max(start, began) for start, end in tuple(self._pauses) if end > began)


class Watch:
    """One worker's part in the watch, from its beginning to `close`."""

    def __init__(self, facts: env.WorkerFacts, timeout_s: float) -> None:
        """Collectives wait for `timeout_s`; so long may anything take before all workers have made a step."""
        self._facts = facts
        self._hostname = socket.gethostname()
        self._hang_timeout_s = env.value(env.HANG_TIMEOUT, float) or HANG_TIMEOUT_S
        self._first_timeout_s = env.value(env.HANG_TIMEOUT, float) or timeout_s
        self._clock = WatchClock(self._hang_timeout_s)
        self.folder = env.value(env.RUN_DIR, Path)
        """Where reports go; None: to standard error alone."""
        self.states: list[WorkerState] = []
        """What all workers did a moment ago, by rank; empty where this worker does not look at the others."""
        self._posted: dict[int, tuple[int, float]] = {}
        """The number of each worker's last post, and when it was first seen, on the monotonic clock."""
        self._call: tuple[int | None, str, float] = (None, "", 0.0)
        """The step of this worker's last post, the function of torch.distributed that it was in, and since when."""
        self._heartbeats: dict[int, Path] = {}
        """The heartbeat of each worker, beside which it dumps its stacks."""
        self.abort: Callable[[], None] | None = None
        """Ends what waits for a lost worker, in another thread; None: nothing does."""
        self.lost: int | None = None
        """The rank of a worker that has ended while others waited for it."""
        self._has_aborted = threading.Event()
        self._is_store_lost = False
        self._num_ends = 0
        self._stacks = own_file().with_name(f"stacks-{os.getpid()}").open("w")
        faulthandler.register(signal.SIGUSR2, self._stacks.fileno())
        # A connection of its own: a client that waits keeps others waiting.
        client = TCPStore(*store_address(facts), is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
        self._store = PrefixStore(f"paceline-watch-{env.text(env.RESTART)}", client)
        if facts.rank == 0:  # torchrun's store outlives a restart for changed membership, whose number stays
            for name in ("lost", "reported"):
                self._store.delete_key(name)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch: this worker's run is over."""
        self._is_over.set()
        self._thread.join(STORE_TIMEOUT_S)

    def allow_ends(self) -> None:
        """From now on a worker may end: once all are here, or after a while, as one may still be busy in its script."""
        self._num_ends += 1
        names = [f"over-{self._num_ends}-{rank}" for rank in range(self._facts.world_size)]
        deadline = time.monotonic() + OVER_S
        with contextlib.suppress(RuntimeError):  # rank 0, which has the store, has ended
            self._store.set(names[self._facts.rank], "")
            while not self._store.check(names) and time.monotonic() < deadline and self.lost is None:
                time.sleep(0.05)
        self.abort = None

    def _run(self) -> None:
        number = 0
        while not self._is_over.wait(self._clock.interval_s if number else 0.0):
            number += 1
            try:
                if self._has_store:
                    self._post(number)
                    if self._facts.local_rank < 2:
                        self._read()
            except RuntimeError as error:  # rank 0 is gone, or stopped
                self._is_store_lost |= isinstance(error, dist.DistNetworkError)
            states = [self._as_of_now(state) for state in self.states]  # none where this worker does not look at others
            have_trained = all(state.has_trained for state in states)
            bound_s = (self._hang_timeout_s if have_trained else self._first_timeout_s) - 2 * self._clock.interval_s
            hang = find_hang(states, bound_s)
            if hang is not None and not self._is_over.is_set():
                self._end(hang, states)
            if self.abort is not None and self.lost is None:
                self._abort_if_lost(self.abort)

    @property
    def _has_store(self) -> bool:
        """Whether the store may be asked: without rank 0, which serves it, torch would tell of each attempt."""
        is_elsewhere = not self.states or self.states[0].hostname != self._hostname
        return not self._is_store_lost and (is_elsewhere or not self._is_gone(self.states[0]))

    def _post(self, number: int) -> None:
        vitals = self._with_calls_of_torch(read_vitals(own_file()))
        told = {
            "number": number,
            "pid": os.getpid(),
            "hostname": self._hostname,
            "local_rank": self._facts.local_rank,
            "step": vitals.step,
            "inside_s": vitals.inside_s,
            "collective": vitals.collective,
            "has_trained": vitals.has_trained,
            "memory_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            "heartbeat": str(own_file()),
        }
        self._store.set(str(self._facts.rank), json.dumps(told))

    def _with_calls_of_torch(self, vitals: Vitals) -> Vitals:
        """A worker that is long in one step may wait in a call of torch.distributed that nobody records, such as one of
        its script: Python's own dump of its main thread shows it."""
        now, (step, call, since) = time.monotonic(), self._call
        if vitals.inside_s is not None or vitals.step != step:
            self._call = vitals.step, "", now
            return vitals
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            main = rf"Thread 0x0*{threading.main_thread().ident:x} .*\n  File \".*/distributed_c10d.py.* in (\w+)"
            found = re.search(main, file.read())
        if found is None or found[1] != call:
            self._call = step, found[1] if found else "", now
            return vitals
        return replace(vitals, inside_s=now - since, collective=_OF_TORCH + call)

    def _read(self) -> None:
        """Read what all workers have posted."""
        keys = [str(rank) for rank in range(self._facts.world_size)]
        if not self._store.check(keys):
            return  # one has not begun
        now, states = time.monotonic(), []
        for rank, text in enumerate(self._store.multi_get(keys)):
            told = json.loads(text)
            number = told.pop("number")
            if self._posted.get(rank, (0, 0.0))[0] != number:
                self._posted[rank] = number, now
            self._heartbeats[rank] = Path(told.pop("heartbeat"))
            states.append(WorkerState(rank=rank, **told))
        self.states = states
        if self._facts.rank == 0 and self.folder is not None:  # workers.json, for those who watch a run
            shown = [WorkerStatus(s.rank, s.hostname, s.pid, s.step, s.doing, s.memory_bytes) for s in states]
            with contextlib.suppress(OSError):
                RunStatus(time.time(), tuple(shown)).save(self.folder / STATUS_FILE, run_file_mode())

    def _as_of_now(self, state: WorkerState) -> WorkerState:
        age_s = self._clock.watched_s(time.monotonic() - self._posted[state.rank][1])
        inside_s = None if state.inside_s is None else state.inside_s + age_s
        if state.hostname == self._hostname:  # its last post may be a second old
            vitals = read_vitals(self._heartbeats[state.rank])
            is_new = vitals.step != state.step or not state.collective.startswith(_OF_TORCH)
            if vitals.step is not None and (is_new or vitals.inside_s is not None):
                state, inside_s = replace(state, step=vitals.step, collective=vitals.collective), vitals.inside_s
        return replace(
            state, heartbeat_age_s=age_s, inside_s=None if inside_s is None else self._clock.watched_s(inside_s)
        )

    def _end(self, hang: Hang, states: Sequence[WorkerState]) -> None:
        """Report the hang, or leave that to who is nearer, if possible no culprit, and end culprits on this node."""
        self._is_over.set()
        host = next(state.hostname for state in states if state.rank == hang.culprits[0])
        awake = [one for one in states if one.local_rank < 2 and (one.heartbeat_age_s or 0.0) < STALE_S]
        nearest = min(awake, key=lambda one: (one.hostname != host, one.rank in hang.culprits, one.rank), default=None)
        here = [one for one in states if one.rank in hang.culprits and one.hostname == self._hostname]
        if nearest is None or nearest.rank == self._facts.rank:
            stacks = {one.rank: self._stacks_of(one) for one in here}
            self._publish(describe_hang(hang, states, stacks, time.time()))
        else:
            deadline = time.monotonic() + OTHERS_S
            while not self._is_reported() and time.monotonic() < deadline:
                time.sleep(0.05)
        for one in sorted(here, key=lambda one: one.pid == os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)

    def _abort_if_lost(self, abort: Callable[[], None]) -> None:
        """Look for a worker that has ended, on this node or as those on its node say, or one of a silent node."""
        states = [self._as_of_now(state) for state in self.states]
        gone = [one.rank for one in states if one.hostname == self._hostname and self._is_gone(one)]
        heard = {one.hostname for one in states if (one.heartbeat_age_s or 0.0) < SILENT_S}
        gone += [one.rank for one in states if one.hostname not in heard and self._hostname in heard]
        try:
            if self._has_store and gone:
                self._store.set("lost", str(gone[0]))
            elif self._has_store and self._store.check(["lost"]):
                gone = [int(self._store.get("lost"))]
        except dist.DistNetworkError:
            gone = gone or [0]  # it serves the store
        if gone:
            self.lost = gone[0]  # before anything is aborted: `check` looks at it after that
            try:
                abort()
            finally:
                self._has_aborted.set()

    def loss_behind(self, error: BaseException) -> PeerLost | None:
        """The loss that led to an error of this worker; None where all workers are there.

        Whatever is raised after a loss may come of what aborted collectives have left.
        """
        if self.abort is not None and (self.lost is not None or isinstance(error, dist.DistError)):
            self._has_aborted.wait(NOTICE_S)  # NCCL may be told before this watch is
        return self.loss

    @property
    def loss(self) -> PeerLost | None:
        """The loss of a worker, so that what it took part in may mean nothing; None where all are there."""
        ended = f"Rank {self.lost} ended while this worker was waiting for it."
        return None if self.lost is None else PeerLost(ended, rank=self.lost)

    def _stacks_of(self, state: WorkerState) -> str:
        """Python's stacks of a worker of this node, without Paceline's own threads."""
        path, text = self._heartbeats[state.rank].with_name(f"stacks-{state.pid}"), ""
        ours = r"paceline/(train/peers|comm/aggregator)\.py"
        with contextlib.suppress(OSError):
            os.kill(state.pid, signal.SIGUSR2)
            deadline = time.monotonic() + STACKS_S
            while time.monotonic() < deadline:
                time.sleep(0.05)
                before, text = text, path.read_text(errors="replace")
                if text and text == before:  # complete
                    break
        return "\n\n".join(thread for thread in text.split("\n\n") if not re.search(ours, thread))

    def _publish(self, report: FailureReport) -> None:
        """Write the report of this run, and show it where no launcher does, unless another worker has."""
        with contextlib.suppress(RuntimeError):
            own = str(self._facts.rank)
            if self._has_store and self._store.compare_set("reported", "", own) != own.encode():
                return
        place = None if self.folder is None else report.save(self.folder)
        if not env.value(env.AGENT, int):
            # Torch's exception hook holds back what is written to sys.stderr.
            print(f"\npaceline: {report.text()}", end="", file=sys.__stderr__)
            print("" if place is None else f"The report: {place}", file=sys.__stderr__, flush=True)

    def _is_reported(self) -> bool:
        try:
            return self._has_store and bool(self._store.check(["reported"]))
        except RuntimeError as error:
            self._is_store_lost |= isinstance(error, dist.DistNetworkError)
            return False

    def tell(self, failure: Failure) -> None:
        """Report an exception that ends this worker, or the loss of the peer that it comes of."""
        rank, world_size = self._facts.rank, self._facts.world_size
        if not failure.is_consequence:
            step = read_vitals(own_file()).step
            own = WorkerState(rank=rank, pid=os.getpid(), hostname=self._hostname, step=step)
            states = [self._as_of_now(state) for state in self.states]
            facts, values = {"what": failure.told, "world_size": world_size}, {"evidence": failure.traceback}
            self._publish(report_of("exception", states or [own], (rank,), facts, noticed_at=failure.time, **values))
        deadline = time.monotonic() + OTHERS_S
        while failure.is_consequence and not self._is_over.is_set() and time.monotonic() < deadline:
            states = [self._as_of_now(state) for state in self.states]
            gone = [one for one in states if one.rank != rank and self._is_gone(one)]
            if self._is_reported():  # looked at last: who raises reports before it is gone
                return
            if gone:
                self._publish(report_of("peer_lost", states, (gone[0].rank,), {}, noticed_at=failure.time))
                return
            time.sleep(0.05)

    def _is_gone(self, state: WorkerState) -> bool:
        if state.hostname != self._hostname:
            return (state.heartbeat_age_s or 0.0) >= STALE_S
        try:  # a letter says what the process does
            return Path(f"/proc/{state.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True


def store_address(facts: env.WorkerFacts) -> tuple[str, int]:
    """The host and the port where rank 0, or the agent of its node, serves the store of the run."""
    address = urlsplit(facts.init_method)
    return address.hostname or env.text("MASTER_ADDR"), address.port or int(env.text("MASTER_PORT"))


_watches: list[Watch] = []
"""The watch of this process, if it has one."""


def begin_watch(facts: env.WorkerFacts, timeout_s: float) -> None:
    """Begin to watch the other workers, once all are connected; nothing happens where that is done already."""
    if not _watches and facts.world_size > 1:
        _watches.append(Watch(facts, timeout_s))


def current_watch() -> Watch | None:
    """The watch of this process; None in a process alone, or in a group that its script has made."""
    return _watches[0] if _watches else None


def end_watch() -> None:
    while _watches:
        _watches.pop().close()


def tell_failures(facts: env.WorkerFacts) -> None:
    """Have an exception that ends this process told to who reports failures, and the process end at once then: a
    process group, or a thread that waits for peers, would hold up the interpreter's end."""
    show, has_agent, has_supervisor = sys.excepthook, bool(env.text(env.AGENT)), bool(env.text(env.HEARTBEAT))
    if not has_agent and facts.world_size == 1:
        return

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, Exception):
            show(kind, error, trace)
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torch's agent ends all workers as soon as one has failed
        failure, is_noted = _failure(error), False
        if has_agent:
            with contextlib.suppress(OSError):
                replace_text(failure_path(own_file(), os.getpid()), json.dumps(asdict(failure)))
                is_noted = True
        if not is_noted:
            traceback.print_exception(error, file=sys.__stderr__)
            for watch in _watches:  # the store of a stopped rank 0 answers nobody, ever
                telling = threading.Thread(target=watch.tell, args=(failure,), daemon=True)
                telling.start()
                telling.join(2 * OTHERS_S)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, broken or replaced by the program
            sys.stdout.flush()
        if not has_supervisor:  # a folder of this process, which does not reach its `atexit`
            shutil.rmtree(own_file().parent, ignore_errors=True)
        os._exit(error.exit_code if isinstance(error, PacelineError) else 1)

    sys.excepthook = end


def _failure(error: BaseException) -> Failure:
    lines = traceback.TracebackException.from_exception(error)
    is_user_error = isinstance(error, PacelineError) and not isinstance(error, PeerLost)
    innermost = lines.stack[-1].filename if lines.stack else ""
    is_inside = read_vitals(own_file()).inside_s is not None and ("/torch/" in innermost or "/paceline/" in innermost)
    is_consequence = isinstance(error, RuntimeError) and (is_inside or "/torch/distributed/" in innermost)
    told = str(error) if is_user_error else raised_in("".join(lines.format_exception_only()))
    if is_user_error and (place := place_in("".join(lines.format()), 1)):
        told = f"{place}: {told}"
    return Failure(
        time=time.time(),
        message=shortened(printable(told), 10_000),
        traceback="" if is_user_error else shortened(printable("".join(lines.format())), 100_000),
        is_user_error=is_user_error,
        is_consequence=is_consequence or isinstance(error, PeerLost),
    )
