"""Whoever ends the launcher ends the run: its workers go with it, and it says no more than that."""

from __future__ import annotations

import os
import signal

import pytest

from tests.kit.commands import TRACEBACK
from tests.kit.stage import Ended, Stage, ended
from tests.kit.waiting import wait_until

BUSY = """
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
tell(f"child-of-{RANK}.pid", str(child.pid))

def save(*_):
    tell("asked")
    await_mark("storage-answers")
    tell("saved")
    os._exit(143)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if RANK == 1 else ():  # whichever the launcher sends on
    signal.signal(number, save)
tell(f"{RANK}.ready")
park()
"""
"""Workers that have started a process, as data loaders do; one saves when it is asked to end."""


def assert_nobody_is_blamed(stage: Stage, end: Ended, exit_code: int) -> None:
    assert end.exit_code == exit_code, end
    assert TRACEBACK not in end.err and "Rank" not in end.err, end.err
    assert not (stage.folder / "run" / "failure.json").exists()


@pytest.mark.parametrize("receivers", ["the launcher", "its process group"])
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
    ids=["SIGTERM", "Ctrl-C", "the terminal closes"],
)
def test_a_signal_ends_the_launcher_its_workers_when_they_have_saved_and_what_they_started(
    stage: Stage, number: signal.Signals, exit_code: int, receivers: str
) -> None:
    launcher = stage.launch(stage.script(BUSY))
    stage.await_marks("0.ready", "1.ready")
    assert len(stage.pids()) == 4
    (os.kill if receivers == "the launcher" else os.killpg)(launcher.pid, number)
    stage.await_marks("asked")
    (stage.folder / "storage-answers").touch()
    assert_nobody_is_blamed(stage, ended(launcher), exit_code)
    assert (stage.folder / "saved").exists()


def test_a_second_ctrl_c_does_not_wait_for_workers_that_do_not_end(stage: Stage) -> None:
    script = stage.script(
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: tell(f"{RANK}.asked"))
        tell(f"{RANK}.ready")
        park()
        """
    )
    launcher = stage.launch(script)
    stage.await_marks("0.ready", "1.ready")
    launcher.send_signal(signal.SIGINT)
    stage.await_marks("0.asked", "1.asked")
    launcher.send_signal(signal.SIGINT)
    assert_nobody_is_blamed(stage, ended(launcher), 130)


def test_workers_that_are_about_to_start_end_with_a_killed_launcher(stage: Stage) -> None:
    launcher = stage.launch(stage.script("park()"), num_workers=4)
    wait_until(lambda: bool(stage.pids()))  # the first; the others may be anywhere in their start
    launcher.kill()
    stage.await_nobody()


def test_a_signal_to_one_worker_is_a_failure_of_this_worker(stage: Stage) -> None:
    launcher = stage.launch(stage.script('tell(f"{RANK}.ready", str(os.getpid()))', "park()"))
    stage.await_marks("0.ready", "1.ready")
    os.kill(int((stage.folder / "1.ready").read_text()), signal.SIGTERM)
    end = ended(launcher)
    assert end.exit_code == 143, end
    assert stage.report()["ranks"] == [1]
    assert "Rank 1 of 2" in end.err and "SIGTERM" in end.err
