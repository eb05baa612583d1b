"""A worker fails: the user hears which one and why, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import LaunchError, PacelineError, WorkerFailed
from paceline.launch.run_workers import run_workers
from paceline.launch.team import LaunchOptions
from paceline.spec import Plan
from tests.old.ranks.launching import Stage, open_stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path) as stage:
        yield stage


def test_all_workers_end_well(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    stage.run("print('from', RANK, 'of', WORLD_SIZE)", world_size=3)
    assert capfd.readouterr() == ("from 0 of 3\n", "")
    assert (stage.run_dir / "logs" / "rank2.log").read_text() == "from 2 of 3\n"


def test_an_exception_names_its_rank_and_begins_at_the_users_line(stage: Stage) -> None:
    error = stage.failure(
        """
        if RANK == 1:
            await_mark("0.pid"), await_mark("2.pid")
            def load():
                raise ValueError("no such label: 11")
            load()
        park()
        """,
        world_size=3,
    )
    pid = int((stage.folder / "1.pid").read_text())
    assert str(error) == f"Rank 1 of 3 (pid {pid}) failed with ValueError: no such label: 11"
    assert (error.rank, error.exit_code) == (1, 1)
    frames = [line.strip() for line in error.details.splitlines() if line.lstrip().startswith("File ")]
    assert len(frames) == 2
    assert frames[0].startswith(f'File "{stage.folder / "program.py"}"') and frames[0].endswith("<module>")
    assert frames[1].endswith("in load")
    assert error.details.endswith("ValueError: no such label: 11\n")
    stage.assert_nobody_left()


def test_a_mistake_of_the_user_keeps_its_sentence_alone(stage: Stage) -> None:
    with pytest.raises(PacelineError) as caught:
        stage.run(
            """
            from paceline.errors import DataError
            raise DataError("train.bin is cut short: download it again.")
            """,
            world_size=2,
        )
    assert type(caught.value) is PacelineError
    assert str(caught.value) == "train.bin is cut short: download it again."


def test_an_exit_code_comes_with_the_last_lines_of_the_log(stage: Stage) -> None:
    error = stage.failure(
        """
        if RANK == 1:
            for line in range(100):
                print("line", line)
            sys.exit(3)
        park()
        """,
        world_size=2,
    )
    assert str(error).startswith("Rank 1 of 2 (pid ") and str(error).endswith("ended with exit code 3.")
    assert (error.rank, error.exit_code) == (1, 3)
    assert error.details.splitlines() == [f"line {line}" for line in range(70, 100)]


def test_who_called_exit_is_named_though_its_peers_end_sooner(stage: Stage) -> None:
    """The interpreter may take longer to shut down than a peer that has lost its connection to it takes to fail."""
    error = stage.failure(
        """
        if RANK == 1:
            import atexit
            atexit.register(lambda: (tell("leaving"), park()))
            sys.exit(3)
        await_mark("leaving")
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9")
        """,
        world_size=2,
    )
    assert str(error).startswith("Rank 1 of 2 (pid ") and str(error).endswith("ended with exit code 3.")
    assert (error.rank, error.exit_code) == (1, 3)


def test_a_worker_killed_from_outside_hints_at_memory(stage: Stage) -> None:
    error = stage.failure(
        "if RANK == 0: os.kill(os.getpid(), signal.SIGKILL)\npark()",
        world_size=2,
    )
    assert "was killed by SIGKILL from outside this run" in str(error) and "memory" in str(error)
    assert (error.rank, error.exit_code) == (0, 128 + signal.SIGKILL)


def test_a_crash_shows_where_python_was(stage: Stage) -> None:
    error = stage.failure(
        """
        def crash():
            os.abort()
        if RANK == 1:
            crash()
        park()
        """,
        world_size=2,
    )
    assert "was killed by SIGABRT." in str(error)
    assert "in crash" in error.details


def test_who_ignores_sigterm_is_killed_after_the_grace(stage: Stage) -> None:
    error = stage.failure(
        """
        if RANK == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            tell("deaf")
            park()
        await_mark("deaf")
        tell("failed-at", str(time.monotonic()))
        raise KeyError("weights")
        """,
        world_size=2,
        grace_s=0.5,
    )
    assert error.rank == 1
    assert time.monotonic() - float((stage.folder / "failed-at").read_text()) >= 0.5


def test_finally_blocks_run_when_a_peer_fails(stage: Stage) -> None:
    error = stage.failure(
        """
        if RANK == 0:
            try:
                tell("inside")
                park()
            finally:
                tell("cleaned")
        await_mark("inside")
        raise KeyError("weights")
        """,
        world_size=2,
    )
    assert error.rank == 1
    assert (stage.folder / "cleaned").exists()


def test_grandchildren_end_with_a_failed_run(stage: Stage) -> None:
    stage.failure(
        """
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        tell(f"{RANK}-child.pid", str(child.pid))
        if RANK == 1:
            await_mark("0-child.pid")
            raise ValueError("boom")
        park()
        """,
        world_size=2,
    )
    assert len(stage.pids()) == 4
    stage.assert_nobody_left()


def test_grandchildren_end_with_a_run_that_ended_well(stage: Stage) -> None:
    stage.run(
        """
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        tell(f"{RANK}-child.pid", str(child.pid))
        """,
        world_size=1,
    )
    assert len(stage.pids()) == 2
    stage.assert_nobody_left()


def test_a_thread_of_the_program_does_not_hold_up_its_failure(stage: Stage) -> None:
    error = stage.failure("threading.Thread(target=park).start()\nraise ValueError('with a thread left')", world_size=1)
    assert error.rank == 0
    stage.assert_nobody_left()


def test_a_peer_that_lost_touch_is_not_blamed(stage: Stage) -> None:
    """The cause is told after its consequence here: a worker may unwind for a while before it says why."""
    error = stage.failure(
        """
        if RANK == 0:
            await_mark("unwinding")
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9")
        await_mark("0.pid")
        try:
            raise ZeroDivisionError("the cause")
        finally:
            tell("unwinding")
            peer = int((STAGE / "0.pid").read_text())
            deadline = time.monotonic() + 30
            while Path(f"/proc/{peer}").exists():  # reaped: the launcher knows
                assert time.monotonic() < deadline
        """,
        world_size=2,
    )
    assert (error.rank, error.details.splitlines()[-1]) == (1, "ZeroDivisionError: the cause")


def test_a_worker_that_left_early_is_named(stage: Stage) -> None:
    error = stage.failure(
        """
        if RANK == 0:
            await_mark("1.pid")
            peer = int((STAGE / "1.pid").read_text())
            deadline = time.monotonic() + 30
            while Path(f"/proc/{peer}").exists():
                assert time.monotonic() < deadline
            raise RuntimeError("Connection closed by peer [127.0.0.1]:9")
        """,
        world_size=2,
    )
    assert "lost touch with the other workers (rank 1 had ended without an error)" in str(error)


def test_the_folders_of_a_run_are_the_users_alone(stage: Stage) -> None:
    stage.run("", world_size=2)
    for folder in (stage.run_dir, stage.run_dir / "logs", stage.run_dir / "failures"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_run_is_not_blamed_for_its_predecessor_in_the_same_folder(stage: Stage) -> None:
    assert stage.failure("raise ValueError('first')", world_size=2).details
    error = stage.failure("if RANK == 1: sys.exit(4)\npark()", world_size=2)
    assert str(error).endswith("ended with exit code 4.") and error.details == ""


def test_the_lines_of_all_workers_carry_their_rank(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    script = stage.script(
        """
        print("out")
        print("err", file=sys.stderr)
        print("no newline", end="")
        """
    )
    run_workers(Plan(world_size=3), (script,), LaunchOptions(stage.run_dir, output="all"))
    out, err = capfd.readouterr()
    expected = [
        "out",
        "no newline",
        "[rank 1] out",
        "[rank 1] no newline",
        "[rank 2] out",
        "[rank 2] no newline",
    ]
    assert sorted(out.replace("no newline[", "no newline\n[").splitlines()) == sorted(expected)
    assert sorted(err.splitlines()) == sorted(["err", "[rank 1] err", "[rank 2] err"])
    assert "no newline" in (stage.run_dir / "logs" / "rank1.log").read_text()


@pytest.mark.parametrize("program", [("nowhere.py",), ("-m", "paceline_nowhere")])
def test_a_program_that_does_not_exist_is_the_users_mistake(stage: Stage, program: tuple[str, ...]) -> None:
    with pytest.raises(PacelineError, match="nowhere") as caught:
        run_workers(Plan(world_size=1), program, LaunchOptions(stage.run_dir))
    assert not isinstance(caught.value, WorkerFailed)


def test_a_run_folder_that_is_a_file_is_the_users_mistake(stage: Stage) -> None:
    stage.run_dir.write_text("not a folder")
    with pytest.raises(LaunchError, match="run folder"):
        stage.run("", world_size=1)


def test_no_descriptor_or_thread_is_left_open(stage: Stage) -> None:
    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208

    script = stage.script("print(RANK)")
    before = resources()
    for _ in range(3):
        run_workers(Plan(world_size=2), (script,), LaunchOptions(stage.run_dir, output="all"))
    stage.failure("if RANK: sys.exit(1)\npark()", world_size=2)
    deadline = time.monotonic() + 5
    while resources() != before:  # the last waiting thread may be on its way out
        assert time.monotonic() < deadline, (before, resources())


def test_what_a_worker_started_in_a_session_of_its_own_ends_with_the_run(stage: Stage) -> None:
    stage.run(
        """
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        tell(f"{RANK}-child.pid", str(child.pid))
        """,
        world_size=2,
    )
    assert len(list(stage.folder.glob("*-child.pid"))) == 2
    stage.assert_nobody_left()


def test_an_exit_handler_that_never_returns_is_told(stage: Stage) -> None:
    script = """
        import atexit
        from paceline.launch import exit_watch

        exit_watch.PATIENCE_S = 0.5

        def upload_for_ever():
            threading.Event().wait()

        if RANK == 1:
            atexit.register(upload_for_ever)
        """
    with pytest.raises(PacelineError, match=r"exit handlers \(atexit\) has not returned within 0.5 s"):
        stage.run(script, world_size=2)
