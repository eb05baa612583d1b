"""Programs that fail on purpose: scripts whose workers tell their process ids and their moments by files in one folder,
and launchers in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.commands import TRACEBACK, user_environ
from tests.kit.waiting import PATIENCE_S, wait_until

PROLOGUE = """\
import os, signal, subprocess, sys, threading, time
from pathlib import Path

RANK, WORLD_SIZE = (int(os.environ.get(name, -1)) for name in ("RANK", "WORLD_SIZE"))
STAGE = Path({stage!r})

def tell(name, text=""):
    "Leave a mark, whole or not at all."
    draft = STAGE / f".{{name}}.{{os.getpid()}}"
    draft.write_text(text)
    draft.rename(STAGE / name)

def await_mark(name):
    deadline = time.monotonic() + {patience_s}
    while not (STAGE / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)

def park():
    "Wait for ever."
    threading.Event().wait()

tell(f"{{RANK}}-{{os.getpid()}}.pid", str(os.getpid()))
"""

TRAINING = """\
import torch
import paceline

def loss_fn(model, shard):
    return (model(shard[0]) - shard[1]).square().mean()

data = torch.utils.data.TensorDataset(torch.arange(64.0).view(64, 1) / 64, torch.ones(64, 1))

def train(dataset=data, **options):
    "Four workers at most; before each of its steps a worker meets `fault()`."
    save = {"dir": str(STAGE / "checkpoints"), "every_steps": 2, "every_minutes": None}
    with paceline.init(global_batch_size=8, virtual_shards=4, epochs=50, checkpoint=save, progress=False) as run:
        model = torch.nn.Linear(1, 1)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for batch in run.batches(dataset, **options):
            fault(run)
            run.step(batch, loss_fn)
"""
"""For behind the prologue: a training that goes on until something happens."""


@dataclass(frozen=True)
class Fault:
    """What one worker does, and what its user must be told."""

    does: str
    exit_code: int
    """Of the launcher."""
    told: tuple[str, ...]
    """On the screen."""
    causes: tuple[str, ...] = ("exit", "exception")
    """Of which the report names one. An exception of a script that does not know Paceline may be known by its exit code
    and its output alone."""


EXCEPTION = Fault("raise ValueError('sample 17 is damaged')", 1, ("ValueError: sample 17 is damaged",))
SIGKILL = Fault("os.kill(os.getpid(), signal.SIGKILL)", 137, ("SIGKILL",), ("signal",))


@dataclass(frozen=True)
class Ended:
    """How a launcher ended, and what it showed."""

    exit_code: int
    out: str
    err: str


@dataclass
class Stage:
    """A folder for the scripts and marks of one test; knows every process that announced itself there."""

    folder: Path
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def script(self, *parts: str, name: str = "script.py") -> str:
        path = self.folder / name
        prologue = PROLOGUE.format(stage=str(self.folder), patience_s=PATIENCE_S)
        path.write_text("\n".join([prologue, *map(textwrap.dedent, parts)]))
        return str(path)

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        """`python -m WORDS` in a session of its own, as a terminal starts a command; modules of this folder can be
        imported."""
        launcher = subprocess.Popen(
            # A test run in the background ignores some signals, and so would its children.
            [sys.executable, "-c", _AS_A_SHELL_STARTS_IT, *words],
            cwd=self.folder,
            env=user_environ(PYTHONPATH=str(self.folder), TMPDIR=str(self.folder), OMP_NUM_THREADS="1", **environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.launchers.append(launcher)
        return launcher

    def launch(self, script: str, *options: str, num_workers: int = 2) -> subprocess.Popen[str]:
        return self.start("paceline", "launch", "-n", str(num_workers), "--out", "run", *options, script)

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "run" / "failure.json").read_text())
        return report

    def pids(self) -> list[int]:
        return [int(mark.read_text()) for mark in self.folder.glob("[!.]*.pid")]

    def await_marks(self, *names: str) -> None:
        wait_until(lambda: all((self.folder / name).exists() for name in names))

    def await_nobody(self) -> None:
        wait_until(lambda: not any(map(is_alive, self.pids())))

    def kill_everybody(self) -> None:
        for launcher in self.launchers:
            launcher.kill()
        for pid in filter(is_alive, self.pids()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.communicate()


_AS_A_SHELL_STARTS_IT = """\
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
"""


@contextlib.contextmanager
def open_stage(folder: Path) -> Iterator[Stage]:
    """A stage on which nobody may be left at the end of the test."""
    stage = Stage(folder)
    try:
        yield stage
        stage.await_nobody()
    finally:
        stage.kill_everybody()


def ended(launcher: subprocess.Popen[str]) -> Ended:
    try:
        out, err = launcher.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired as expired:
        said = (expired.stderr or b"").decode(errors="replace")
        raise AssertionError(f"the launcher runs on after {PATIENCE_S:g} s; it has said:\n{said}") from None
    return Ended(launcher.returncode, out, err)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def is_one_sentence(err: str) -> bool:
    """Whether all that a user sees is a sentence, without a traceback."""
    return TRACEBACK not in err and len(err.splitlines()) == 1
