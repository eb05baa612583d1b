"""The launcher is asked to end, or killed: its workers go with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.old.ranks.command_line import clean_environ
from tests.old.ranks.launching import PATIENCE_S, Stage, open_stage

BUSY = """
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
tell(f"{RANK}-child.pid", str(child.pid))
tell(f"{RANK}.ready")
park()
"""

ENDLESS_S = 10 * PATIENCE_S

DEAF = """
signal.signal(signal.SIGTERM, lambda *_: tell(f"{RANK}.asked"))
tell(f"{RANK}.ready")
park()
"""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as stage:
        yield stage


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_everybody(stage: Stage, number: signal.Signals, exit_code: int) -> None:
    launcher = stage.launch(BUSY, world_size=3, grace_s=ENDLESS_S)  # nobody is deaf: it is not used up
    stage.await_marks("0.ready", "1.ready", "2.ready")
    assert len(stage.pids()) == 6
    launcher.send_signal(number)
    assert launcher.wait(PATIENCE_S) == exit_code
    stage.assert_nobody_left()
    assert not list(stage.folder.glob("paceline-*"))  # the rendezvous
    assert launcher.communicate() == ("", "")


def test_control_c_in_a_terminal_reaches_the_launcher_alone(stage: Stage) -> None:
    ours, theirs = os.openpty()
    try:
        launcher = stage.launch(
            """
            tell(f"{RANK}.ready", str(sys.stdout.isatty()))
            try:
                park()
            except BaseException as end:
                tell(f"{RANK}.end", type(end).__name__)
                raise
            """,
            world_size=2,
            terminal_fd=theirs,
        )
        stage.await_marks("0.ready", "1.ready")
        os.write(ours, b"\x03")
        assert launcher.wait(PATIENCE_S) == 130
    finally:
        os.close(ours)
        os.close(theirs)
    assert [(stage.folder / f"{rank}.ready").read_text() for rank in (0, 1)] == ["True", "False"]
    assert [(stage.folder / f"{rank}.end").read_text() for rank in (0, 1)] == ["Terminated", "Terminated"]


def test_deaf_workers_end_after_the_grace(stage: Stage) -> None:
    launcher = stage.launch(DEAF, world_size=2)
    stage.await_marks("0.ready", "1.ready")
    begun = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 143
    assert time.monotonic() - begun > 2.9
    stage.assert_nobody_left()


def test_what_a_worker_started_lasts_as_long_as_the_worker(stage: Stage) -> None:
    """A training that saves when it is asked to end may need its loaders for that."""
    launcher = stage.launch(
        """
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        tell(f"{RANK}-child.pid", str(child.pid))

        def save(*_):
            time.sleep(0.2)
            tell(f"{RANK}.child", str(child.poll()))
            sys.exit()

        signal.signal(signal.SIGTERM, save)
        tell(f"{RANK}.ready")
        park()
        """,
        world_size=2,
    )
    stage.await_marks("0.ready", "1.ready")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 143
    assert [(stage.folder / f"{rank}.child").read_text() for rank in range(2)] == ["None", "None"]
    stage.assert_nobody_left()


def test_a_wish_to_save_reaches_those_who_can_and_harms_nobody(stage: Stage) -> None:
    launcher = stage.launch(
        """
        if RANK == 0:
            signal.signal(signal.SIGUSR1, lambda *_: tell("saved"))
        tell(f"{RANK}.ready")
        await_mark("go")
        """,
        world_size=2,
    )
    stage.await_marks("0.ready", "1.ready")
    deadline = time.monotonic() + PATIENCE_S
    while not (stage.folder / "saved").exists():  # who has not shown a heartbeat yet is spared
        launcher.send_signal(signal.SIGUSR1)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (stage.folder / "go").touch()
    assert launcher.wait(PATIENCE_S) == 0, launcher.communicate()


def test_a_second_interrupt_kills_at_once(stage: Stage) -> None:
    launcher = stage.launch(DEAF, world_size=2, grace_s=ENDLESS_S)
    stage.await_marks("0.ready", "1.ready")
    launcher.send_signal(signal.SIGINT)
    stage.await_marks("0.asked", "1.asked")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE_S) == 130
    stage.assert_nobody_left()


def test_workers_die_with_a_killed_launcher(stage: Stage) -> None:
    launcher = stage.launch(DEAF, world_size=2)
    stage.await_marks("0.ready", "1.ready")
    launcher.kill()
    stage.assert_nobody_left()


def test_a_launcher_killed_while_its_workers_start_leaves_none(stage: Stage) -> None:
    """The kernel's promise is made by the worker, which may be too late for it."""
    for _ in range(3):
        launcher = stage.launch("park()", world_size=2)
        (stage.folder / "0.pid").unlink(missing_ok=True)
        stage.await_marks("run/logs/rank1.log")  # opened just before the process is made
        launcher.kill()
        launcher.wait(PATIENCE_S)
        stage.assert_nobody_left()
        (stage.run_dir / "logs" / "rank1.log").unlink()


SIGNALLED_WHILE_LOADING = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
moment, number, *words = sys.argv[1:]
class Moment:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Moment())
sys.argv = ["paceline", *words]
runpy.run_module("paceline", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda one: one.name)
@pytest.mark.parametrize(("moment", "command"), [("paceline.cli", "train"), ("paceline.launch.forking", "launch")])
def test_a_signal_before_workers_are_started_is_a_sentence(
    number: signal.Signals, moment: str, command: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").touch()
    words = {"train": ("train", "digits-lenet"), "launch": ("launch", "-n", "2", "script.py")}[command]
    program = [sys.executable, "-c", SIGNALLED_WHILE_LOADING, moment, str(int(number)), *words]
    ended = subprocess.run(
        program, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 128 + number, ended.stderr
    assert ended.stderr.startswith("paceline: ") and ended.stderr.count("\n") == 1, ended.stderr
    assert "no worker is left" not in ended.stderr, "none was started"
