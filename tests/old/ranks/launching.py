"""What the launcher's tests share: scripts that tell their pid, and a launcher in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError, WorkerFailed
from paceline.launch.run_workers import run_workers
from paceline.launch.team import LaunchOptions
from paceline.spec import Plan
from tests.old.ranks.command_line import clean_environ

PATIENCE_S = 30.0
"""For what must happen at some time; what must happen soon has its own limit."""

PROLOGUE = """\
import os, signal, subprocess, sys, threading, time
from pathlib import Path

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STAGE = Path({stage!r})

def tell(name, text=""):
    "Leave a mark, whole or not at all."
    draft = STAGE / f".{{name}}.{{os.getpid()}}"
    draft.write_text(text)
    draft.rename(STAGE / name)

def await_mark(name):
    deadline = time.monotonic() + 30
    while not (STAGE / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)

def park():
    "Wait for ever, as a worker with much to do."
    threading.Event().wait()

tell(f"{{RANK}}.pid", str(os.getpid()))
"""

GENERATION = """\
import json
from paceline import env
from paceline.heartbeat import Heartbeat

GENERATION = len(json.loads((Path(os.environ["PACELINE_RUN_DIR"]) / "elastic.json").read_text())["generations"]) - 1
heartbeat = Heartbeat(env.path(env.HEARTBEAT))
tell(f"{GENERATION}-{RANK}.pid", str(os.getpid()))
"""
"""For behind the prologue, in an elastic run."""

COUNTING = (
    GENERATION
    + """\
import torch, torch.distributed as dist
from paceline.spec import Plan
from paceline.train.process.process_group import join

asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
signal.signal(signal.SIGUSR1, lambda *_: tell(f"asked-to-save.{RANK}"))
world = join(env.worker_facts(), Plan(world_size=WORLD_SIZE, timeout_s=60))
saved = STAGE / "counter.pt"
counter = torch.load(saved) if saved.exists() else {"step": 0, "sum": 0.0}
heartbeat.step(counter["step"])

def save():
    if RANK == 0:
        torch.save(counter, STAGE / "counter.draft")
        (STAGE / "counter.draft").rename(saved)

def step():
    "Adds 1 for each of 12 shards, whoever has them. Returns whether the test wants the end."
    shards = len(range(RANK, 12, WORLD_SIZE))
    values = torch.tensor([float(shards), float(asked.is_set()), float((STAGE / "finish").exists())])
    if WORLD_SIZE > 1:
        dist.all_reduce(values)
    counter["step"] += 1
    counter["sum"] += float(values[0])
    heartbeat.step(counter["step"])
    if values[1]:
        save()
        tell(f"saved.{GENERATION}", str(counter["step"]))
        os._exit(143)
    if counter["step"] % 10 == 0:
        save()
    time.sleep(0.005)
    return bool(values[2])

step()
tell(f"begun.{GENERATION}.{RANK}", str(WORLD_SIZE))
"""
)
"""For behind the prologue: a training that saves a counter every ten steps, and goes on from it at any world size."""

COUNTING_WITHOUT_TORCH = (
    GENERATION
    + """\
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
saved = STAGE / "counter.json"
counter = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "sum": 0.0}
heartbeat.step(counter["step"])

def save():
    if RANK == 0:
        tell("counter.json", json.dumps(counter))

def all_reduce(values):
    "Adds the values of all workers, by files; waits for ever for one that is gone."
    heartbeat.enter("paceline", f"all_reduce number {counter['step']}")
    files = [f"values.{GENERATION}.{counter['step']}.{rank}" for rank in range(WORLD_SIZE)]
    tell(files[RANK], json.dumps(values))
    while not all((STAGE / file).exists() for file in files):
        time.sleep(0.002)
    heartbeat.leave("paceline")
    return [sum(column) for column in zip(*(json.loads((STAGE / file).read_text()) for file in files))]

def step():
    "As in `COUNTING`."
    values = all_reduce([len(range(RANK, 12, WORLD_SIZE)), asked.is_set(), (STAGE / "finish").exists()])
    counter["step"] += 1
    counter["sum"] += values[0]
    heartbeat.step(counter["step"])
    if values[1]:
        save()
        tell(f"saved.{GENERATION}", str(counter["step"]))
        os._exit(143)
    if counter["step"] % 10 == 0:
        save()
    time.sleep(0.02)
    return bool(values[2])

step()
tell(f"begun.{GENERATION}.{RANK}", str(WORLD_SIZE))
"""
)
"""The same for tests of the launcher alone."""

TO_THE_END = """
while not step():
    pass
if RANK == 0:
    print("counted", counter["step"], counter["sum"])
"""

COUNT_TO_THE_END = COUNTING + TO_THE_END
"""Until the file `finish` is there."""

HEARTBEAT = """\
from paceline import env
from paceline.heartbeat import Heartbeat

heartbeat = Heartbeat(env.path(env.HEARTBEAT))

def all_reduce(until=""):
    "What the launcher sees of a worker in a collective, without torch: it waits for a mark, or for ever."
    heartbeat.enter("paceline", "all_reduce number 4")
    await_mark(until) if until else park()
    heartbeat.leave("paceline")
"""
"""For behind the prologue."""

LAUNCHER = """\
import json, signal, sys
from pathlib import Path
from paceline.errors import PacelineError
from paceline.launch.run_workers import run_workers
from paceline.launch.team import LaunchOptions
from paceline.spec import Plan

# A test run in the background ignores them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
script, run_dir, world_size, options = sys.argv[1:]
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
try:
    run_workers(Plan(world_size=int(world_size)), (script,), LaunchOptions(Path(run_dir), **json.loads(options)))
except KeyboardInterrupt:
    sys.exit(130)
except PacelineError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
finally:
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
"""


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s")
        time.sleep(0.01)


def processes_of(run_dir: Path) -> list[Path]:
    """All processes in /proc that were started for the run in a folder, the fork server too."""
    mark, found = f"PACELINE_RUN_DIR={run_dir}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@dataclass
class Stage:
    """A folder for one test's scripts and marks; knows every process that announced itself there."""

    folder: Path
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def script(self, body: str, name: str = "program.py") -> str:
        path = self.folder / name
        path.write_text(PROLOGUE.format(stage=str(self.folder)) + textwrap.dedent(body))
        return str(path)

    def pids(self) -> list[int]:
        return [int(mark.read_text()) for mark in self.folder.glob("[!.]*.pid")]

    def run(self, body: str, *, world_size: int, **options: Any) -> None:
        """Run the script in workers of this very process; `options` are fields of `LaunchOptions`."""
        run_workers(Plan(world_size=world_size), (self.script(body),), LaunchOptions(self.run_dir, **options))

    def failure(self, body: str, *, world_size: int, **options: Any) -> WorkerFailed:
        """How the run of a script that must fail failed."""
        with pytest.raises(PacelineError) as caught:
            self.run(body, world_size=world_size, **options)
        assert isinstance(caught.value, WorkerFailed), caught.value
        return caught.value

    def launch(
        self,
        body: str,
        *,
        world_size: int,
        run_dir: Path | None = None,
        terminal_fd: int | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """A launcher in a process of its own, in a terminal if given one; exits as `paceline` does.

        `options` are fields of `LaunchOptions`.
        """
        streams = subprocess.PIPE if terminal_fd is None else terminal_fd
        launcher = subprocess.Popen(
            [
                *(() if terminal_fd is None else ("setsid", "--ctty")),
                *(sys.executable, "-c", LAUNCHER, self.script(body)),
                *(str(run_dir or self.run_dir), str(world_size), json.dumps(options)),
            ],
            stdin=terminal_fd,
            stdout=streams,
            stderr=streams,
            text=True,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )
        self.launchers.append(launcher)
        return launcher

    def paceline(self, *arguments: str) -> subprocess.Popen[str]:
        """The command in a process of its own; modules of this stage can be imported there."""
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        launcher = subprocess.Popen(
            [sys.executable, "-m", "paceline", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environ(TMPDIR=str(self.folder), PYTHONPATH=path),
        )
        self.launchers.append(launcher)
        return launcher

    def await_marks(self, *names: str, timeout_s: float = PATIENCE_S) -> None:
        wait_until(lambda: all((self.folder / name).exists() for name in names), timeout_s)

    def assert_nobody_left(self) -> None:
        """Who was not ended would live on: a killed process needs its turn on a busy machine."""
        wait_until(lambda: not any(map(is_alive, self.pids())))


@contextlib.contextmanager
def open_stage(folder: Path) -> Iterator[Stage]:
    """A stage that must be empty in the end, and is emptied by force where it is not."""
    stage = Stage(folder)
    try:
        yield stage
        stage.assert_nobody_left()
    finally:
        for launcher in stage.launchers:
            launcher.kill()
        for pid in filter(is_alive, stage.pids()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in stage.launchers:
            launcher.communicate()
