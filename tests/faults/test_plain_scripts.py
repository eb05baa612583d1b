"""Whatever ends a worker of a script that does not know Paceline, `paceline launch` says which worker and why, on one
screen and in failure.json, exits with the worker's exit code, and leaves nobody running."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.stage import EXCEPTION, SIGKILL, Ended, Fault, Stage, ended, is_alive
from tests.kit.waiting import wait_until

EXIT = Fault("sys.exit(3)", 3, ("exit code 3",), ("exit",))
FAULTS = {
    "an exception": EXCEPTION,
    "a failing import": Fault("import no_such_library", 1, ("ModuleNotFoundError", "no_such_library")),
    "no memory": Fault("bytearray(1 << 60)", 1, ("MemoryError",)),
    "sys.exit after a thousand lines": replace(
        EXIT, does="[print('line', number) for number in range(1000)]; sys.exit(3)", told=("exit code 3", "line 999")
    ),
    "sys.exit with a text": Fault("sys.exit('no data here')", 1, ("no data here", "exit code 1"), ("exit",)),
    "os._exit": Fault("os._exit(5)", 5, ("exit code 5",), ("exit",)),
    "SIGKILL": SIGKILL,
    "SIGSEGV": Fault("import ctypes; ctypes.string_at(0)", 139, ("SIGSEGV",), ("signal",)),
    "SIGABRT": Fault("os.abort()", 134, ("SIGABRT",), ("signal",)),
}
HAVE_A_LINE = ("an exception", "a failing import", "no memory", "SIGSEGV", "SIGABRT")
"""Those of which a user is told in which line of the script."""

LARGEST_SCREEN = 50
"""Lines."""


def assert_told(stage: Stage, end: Ended, fault: Fault, ranks: set[int], num_workers: int) -> None:
    """The exit code, the screen and failure.json say what happened to one of `ranks`."""
    report = stage.report()
    (rank,) = report["ranks"]
    assert end.exit_code == fault.exit_code, end
    assert rank in ranks and report["cause"] in fault.causes, report
    assert report["hostname"] in ("", socket.gethostname())
    assert report["exit_code"] == (fault.exit_code if fault.exit_code < 128 else 128 - fault.exit_code)
    assert (stage.folder / f"{rank}-{report['pid']}.pid").exists()
    assert f"Rank {rank} of {num_workers}" in end.err and all(word in end.err for word in fault.told), end.err
    assert len(end.err.splitlines()) <= LARGEST_SCREEN
    assert report["sentence"] in (stage.folder / "run" / "failure.txt").read_text()
    assert stat.S_IMODE((stage.folder / "run" / "failure.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_worker_is_told_with_its_rank(stage: Stage, name: str) -> None:
    fault = FAULTS[name]
    script = stage.script(
        f"""
        def read_sample():
            {fault.does}
        if RANK == 1:
            read_sample()
        park()
        """
    )
    end = ended(stage.launch(script))
    assert_told(stage, end, fault, {1}, 2)
    assert "/paceline/" not in end.err and "/torch/" not in end.err, end.err
    report = stage.report()
    assert "memory" not in report["sentence"]  # the kernel has counted no kill
    if name in HAVE_A_LINE:
        lines = Path(script).read_text().splitlines()
        place = f"script.py, line {1 + next(number for number, line in enumerate(lines) if fault.does in line)}"
        assert "in read_sample" in end.err and any(place in line for line in report["workers"]), report
        assert fault.causes != ("signal",) or f"at {place}" in report["sentence"]


@pytest.mark.budget(processor_s=12)
def test_a_script_that_prepares_data_on_rank_0_is_not_ended_as_hanging(stage: Stage) -> None:
    script = stage.script(
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if RANK == 0:
            time.sleep(5)
        dist.barrier()
        tell(f"{RANK}.done")
        dist.destroy_process_group()
        """
    )
    assert ended(stage.launch(script, "--hang-timeout", "2")).exit_code == 0
    assert (stage.folder / "0.done").exists() and (stage.folder / "1.done").exists()


def test_each_line_of_a_worker_is_shown_whole_once_and_in_order(stage: Stage) -> None:
    script = stage.script("for number in range(4000): print(f'<{RANK}:{number}:' + 60 * 'x' + '>')")
    end = ended(stage.launch(script))
    assert end.exit_code == 0, end
    lines = [line.removeprefix("[rank 1] ") for line in end.out.splitlines()]
    for rank in range(2):
        expected = [f"<{rank}:{number}:{60 * 'x'}>" for number in range(4000)]
        assert [line for line in lines if line.startswith(f"<{rank}:")] == expected
        assert (stage.folder / "run" / "logs" / f"rank{rank}.log").read_text().splitlines() == expected
    assert len(lines) == 8000


BLOCKED = """
for _ in range(2):
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        tell(f"loader-{os.getpid()}.pid", str(os.getpid()))
        while True:
            os.write(write_end, bytes(1 << 16))  # as a loader whose worker takes no batch; both ends are its own
tell(f"{RANK}.ready")
park()
"""


@pytest.mark.parametrize("victim", ["the launcher", "the agent", "a worker"])
def test_what_a_worker_started_ends_whoever_is_killed(stage: Stage, victim: str) -> None:
    launcher = stage.launch(stage.script(BLOCKED, name="blocked.py"))
    stage.await_marks("0.ready", "1.ready")
    wait_until(lambda: len(stage.pids()) == 6)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    worker = next(int(mark.read_text()) for mark in stage.folder.glob("1-*.pid"))
    os.kill({"the launcher": launcher.pid, "the agent": int(children[0]), "a worker": worker}[victim], signal.SIGKILL)
    ended(launcher)
    stage.await_nobody()
    if victim == "the agent":
        assert stage.report()["cause"] == "node_lost"


@pytest.mark.parametrize("name", ["an exception", "SIGKILL"])
def test_of_workers_that_fail_at_once_one_is_told(stage: Stage, name: str) -> None:
    fault = FAULTS[name]
    script = stage.script(
        f"""
        tell(f"{{RANK}}.ready")
        for rank in range(WORLD_SIZE):
            await_mark(f"{{rank}}.ready")
        {fault.does}
        """
    )
    assert_told(stage, ended(stage.launch(script, num_workers=3)), fault, {0, 1, 2}, 3)


def test_the_other_workers_may_clean_up_and_one_that_ignores_sigterm_ends_too(stage: Stage) -> None:
    script = stage.script(
        """
        if RANK == 0:
            signal.signal(signal.SIGTERM, lambda *_: (tell("cleaned"), sys.exit(1)))
        if RANK == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if RANK != 1:
            tell(f"{RANK}.ready")
            park()
        await_mark("0.ready")
        await_mark("2.ready")
        sys.exit(3)
        """
    )
    assert_told(stage, ended(stage.launch(script, num_workers=3)), EXIT, {1}, 3)
    assert (stage.folder / "cleaned").exists()


@pytest.mark.budget(processor_s=12)
def test_a_report_does_not_mention_an_earlier_run_in_the_same_folder(stage: Stage) -> None:
    assert ended(stage.launch(stage.script("raise ValueError('first')"))).exit_code == 1
    end = ended(stage.launch(stage.script("if RANK == 1: sys.exit(3)", "park()")))
    assert "first" not in end.err
    assert_told(stage, end, EXIT, {1}, 2)
    assert ended(stage.launch(stage.script(""))).exit_code == 0
    assert not (stage.folder / "run" / "failure.json").exists()


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group for processes that may have 100 MB together."""
    own = {line.split(":")[1]: line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    root, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if "memory" not in own:
        root, limit = Path("/sys/fs/cgroup"), "memory.max"
    group = root / own.get("memory", own.get("", "/")).lstrip("/") / f"faults-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(100 << 20))
    except OSError:
        pytest.skip("this machine lets nobody make a memory control group")
    yield group
    wait_until(lambda: not any(is_alive(int(pid)) for pid in (group / "cgroup.procs").read_text().split()))
    group.rmdir()


def test_a_worker_that_the_kernel_killed_for_memory_is_distinguished_from_a_signal(
    stage: Stage, small_memory: Path
) -> None:
    script = stage.script(
        f"""
        if RANK == 1:
            Path({str(small_memory)!r}, "cgroup.procs").write_text(str(os.getpid()))
            hoard = []
            while True:
                hoard.append(b"x" * (16 << 20))
        park()
        """
    )
    fault = Fault("", 137, ("out of memory", "killed by the kernel"), ("out_of_memory",))
    assert_told(stage, ended(stage.launch(script)), fault, {1}, 2)
