"""The agent: Paceline's process on a node of a run, which starts workers there and reports on them to the launcher.

It reads messages from standard input and writes messages to standard output, so whatever runs a program on another
machine and joins the streams (ssh, srun, an actor) can carry it; it opens no port of its own. When its input ends, or
nothing has come for as long as a node may be silent, the launcher is gone: the workers are killed and it ends.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import queue
import signal
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from paceline import env
from paceline.errors import LaunchError
from paceline.launch import messages
from paceline.launch.commands import WorkerCommand
from paceline.launch.endpoints import Endpoint, OpenEndpoint, open_endpoints, try_endpoints
from paceline.launch.forking import LOAD_WAIT_S, ForkServer
from paceline.launch.hang import WatchClock
from paceline.launch.messages import AgentMessage
from paceline.launch.team import HANG_TIMEOUT_S, LaunchOptions, LocalTeam, WorkerExited, with_age

MARKER_WAIT_S = 5.0
"""How long a new file on a network file system may stay invisible: clients cache its absence for some seconds."""


def serve(node: dict[str, Any]) -> None:
    """Introduce this node (a `spec.Node` as a mapping), then do what the launcher asks for until it is gone."""
    with contextlib.closing(_Agent()) as agent:
        agent.send(messages.Hello(socket.gethostname(), os.getpid(), versions(), node))
        agent.run()


def versions() -> dict[str, str]:
    """The versions that must be equal on all nodes of a run."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "(none)"
    ours = importlib.metadata.version("paceline")
    return {"paceline": ours, "torch": torch, "Python": platform.python_version()}


class _Agent:
    def __init__(self) -> None:
        # Printed output must not be read as a message.
        self._channel: IO[bytes] = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._send_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._team: LocalTeam | None = None
        self._fork_server: ForkServer | None = None
        self._endpoints: list[OpenEndpoint] = []
        self._last_message_at = time.monotonic()
        self._silence_s = float("inf")
        self._clock = WatchClock(HANG_TIMEOUT_S)
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def send(self, message: AgentMessage) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # the launcher is gone: the inbox will say so
            self._channel.write(message.encode())
            self._channel.flush()

    def run(self) -> None:
        next_report = time.monotonic()
        while self._clock.watched_s(time.monotonic() - self._last_message_at) < self._silence_s:
            try:
                item = self._inbox.get(timeout=max(0.0, next_report - time.monotonic()))
            except queue.Empty:
                next_report = time.monotonic() + self._clock.interval_s
                workers = [] if self._team is None else [asdict(state) for state in self._team.states()]
                self.send(messages.WorkerStates(workers))
                if self._team is not None:
                    self._team.prepare_standby()
                continue
            if item is None:
                return
            try:
                self._do(item)
            except LaunchError as error:
                self.send(messages.Refused(str(error)))

    def close(self) -> None:
        if self._team is not None:
            self._team.close()
        if self._fork_server is not None:
            self._fork_server.close()
        self._close_endpoints()

    def _listen(self) -> None:
        with os.fdopen(os.dup(0), "rb") as incoming:
            for line in incoming:
                self._last_message_at = time.monotonic()
                message = messages.decode(line)
                if not isinstance(message, messages.Ping):
                    self._inbox.put(message)
        self._inbox.put(None)

    def _do(self, item: AgentMessage | WorkerExited) -> None:
        match item:
            case messages.Listen(interface):
                self._close_endpoints()
                self._endpoints = open_endpoints(interface)
                self.send(messages.Listening([asdict(each.endpoint) for each in self._endpoints]))
            case messages.TryEndpoints(endpoints, interface):
                found = try_endpoints([Endpoint(**endpoint) for endpoint in endpoints], interface)
                self.send(messages.Reached([name for name, _ in found], [problem for _, problem in found]))
            case messages.Start():
                self._start(item)
            case messages.ShowStacks(ranks):
                stacks = {} if self._team is None else self._team.stacks(ranks)
                self.send(messages.Stacks({str(rank): text for rank, text in stacks.items()}))
            case messages.SignalWorkers(number, ranks):
                if self._team is not None:
                    self._team.signal(number, ranks)
                elif number == signal.SIGKILL:
                    self.send(messages.RunEnded())
            case WorkerExited(_, rank):
                self._note_exit(rank)

    def _start(self, start: messages.Start) -> None:
        if self._team is not None:
            raise LaunchError("An earlier run still has workers on this node; wait for it to end.")
        options = LaunchOptions(**start.options | {"run_dir": Path(start.options["run_dir"])})
        await_marker(options.run_dir, start.marker)
        commands = [WorkerCommand(**command) for command in start.commands]
        chosen = next((each for each in self._endpoints if each.endpoint.port == start.port), None)
        sockets = {}
        if chosen is not None:
            _forget_callers(chosen.store)
            sockets = {env.STORE_FD: chosen.store.fileno(), env.TORCH_STORE_FD: chosen.torch_store.fileno()}
        self._silence_s = options.hang_timeout_s
        self._clock = WatchClock(options.hang_timeout_s)
        fork_server = None
        if options.preload:
            fork_server = self._fork_server = self._fork_server or ForkServer(options.preload)
            if not options.is_elastic:  # which prepares it beside the training
                fork_server.load(commands[0].variables, LOAD_WAIT_S, is_interrupted=lambda: not self._inbox.empty())
        self._team = LocalTeam(options, self._inbox.put, fork_server)
        self._team.start(
            commands,
            sockets=sockets,
            show=lambda fd, lines: self.send(messages.OutputText(fd, lines.decode(errors="replace"))),
        )
        self._close_endpoints()  # rank 0 has inherited the socket that it needs
        self.send(messages.Started(list(self._team.running)))

    def _note_exit(self, rank: int) -> None:
        assert self._team is not None
        ending = with_age(self._team.collect(rank), time.time())
        is_last = not self._team.running
        if is_last:
            self._team.close()  # sends the last output of the workers
            self._team = None
        self.send(messages.Exited(asdict(ending)))
        if is_last:
            self.send(messages.RunEnded())

    def _close_endpoints(self) -> None:
        for each in self._endpoints:
            each.close()
        self._endpoints = []


def await_marker(run_dir: Path, marker: str) -> None:
    deadline = time.monotonic() + MARKER_WAIT_S
    while not (run_dir / marker).exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"the run folder {run_dir} is not the launcher's here; put it on a file system that all nodes share."
            )
        time.sleep(0.1)


def _forget_callers(listening: socket.socket) -> None:
    """Close connections that only probed the endpoint, before the store takes them for workers."""
    listening.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            listening.accept()[0].close()
    listening.setblocking(True)
