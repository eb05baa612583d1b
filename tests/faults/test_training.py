"""A training whose worker fails, hangs or is killed says which rank, where and after how many steps; the errors of its
peers are consequences and are not reported as the cause. What was saved is good."""

from __future__ import annotations

from dataclasses import replace

import pytest

import paceline
from tests.kit.commands import TRACEBACK
from tests.kit.stage import EXCEPTION, SIGKILL, TRAINING, Ended, Fault, Stage, ended

HANG_TIMEOUT_S = 6
"""How long a hang has to last; long enough for a step on a machine that does much else."""


STUCK_IN_PYTHON = """
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""

FAULTS = {
    "an exception": replace(EXCEPTION, told=(*EXCEPTION.told, "in fault"), causes=("exception",)),
    "os._exit": Fault("os._exit(3)", 3, ("exit code 3",), ("exit",)),
    "SIGKILL": SIGKILL,
    "SIGSEGV": Fault("import ctypes; ctypes.string_at(0)", 139, ("SIGSEGV", "in fault"), ("signal",)),
    "a hang": Fault(STUCK_IN_PYTHON, 1, ("in fault", "waiting: rank 0"), ("hung",)),
    "a stop": Fault("os.kill(os.getpid(), signal.SIGSTOP)", 1, ("hangs", "waiting: rank 0"), ("hung",)),
}
"""What rank 1 does before its fourth step."""

EVERY_TIME = ("an exception", "SIGKILL", "a hang")


def script_of(stage: Stage, does: str, then: str = "train()") -> str:
    body = "\n".join(f"        {line}" for line in does.strip().splitlines())
    fault = f"""
def fault(run):
    if RANK == 0 and run.steps == 2:
        time.sleep(1)  # in which rank 1 is seen waiting, which it no longer is in its fault
    if RANK == 1 and run.steps == 3:
        await_mark("checkpoints/step-00000002/manifest.json")
{body}
"""
    return stage.script(TRAINING, fault, then)


def assert_told(stage: Stage, end: Ended, fault: Fault) -> None:
    report = stage.report()
    assert end.exit_code == fault.exit_code, end
    assert report["cause"] in fault.causes and (report["ranks"], report["step"]) == ([1], 3), report
    assert "Rank 1 of 2" in end.err and all(word in end.err for word in fault.told), end.err
    assert any(line.startswith("rank 0") for line in report["workers"]), "what the other was doing"
    assert TRACEBACK not in end.err or "exception" in fault.causes, end.err
    first, *later = paceline.checkpoint.verify(stage.folder / "checkpoints")
    assert (first.step, first.state) == (2, "good")
    assert {one.state for one in later} <= {"good", "unfinished"}
    assert not list(stage.folder.glob("paceline-*")), "temporary files of workers are left"


@pytest.mark.budget(processor_s=20)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.nightly) for name in FAULTS]
)
def test_a_fault_in_a_step_is_told_with_its_rank_and_step(stage: Stage, name: str) -> None:
    fault = FAULTS[name]
    launcher = stage.launch(script_of(stage, fault.does), "--hang-timeout", str(HANG_TIMEOUT_S))
    assert_told(stage, ended(launcher), fault)


@pytest.mark.nightly
@pytest.mark.budget(processor_s=20)
def test_a_hang_in_a_data_loader_is_told_with_its_rank(stage: Stage) -> None:
    """The stack is of the worker that waits for its loader."""
    script = stage.script(
        TRAINING,
        """
        def fault(run):
            pass

        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 64

            def __getitem__(self, index):
                if RANK == 1 and index == 5:
                    tell("loader-of-1.pid", str(os.getpid()))
                    park()
                return data[index]

        train(Slow(), num_workers=1)
        """,
    )
    end = ended(stage.launch(script, "--hang-timeout", str(HANG_TIMEOUT_S)))
    report = stage.report()
    assert end.exit_code == 1
    assert (report["cause"], report["ranks"]) == ("hung", [1]), report
    assert "Rank 1 of 2" in end.err and "dataloader.py" in end.err, end.err
    assert (stage.folder / "loader-of-1.pid").exists()  # the fixture sees that it has ended


@pytest.mark.budget(processor_s=20)
def test_an_exception_in_a_data_loader_is_told_in_the_users_own_words(stage: Stage) -> None:
    """Torch cannot raise an exception with two arguments again, and wraps it."""
    script = stage.script(
        TRAINING,
        """
        def fault(run):
            pass

        class Damaged(Exception):
            def __init__(self, path, offset):
                self.path, self.offset = path, offset

            def __str__(self):
                return f"shard {self.path} is damaged at byte {self.offset}"

        class Shards(torch.utils.data.Dataset):
            def __len__(self):
                return 64

            def __getitem__(self, index):
                if index == 41:
                    raise Damaged("train-07.tar", 4096)
                return data[index]

        train(Shards(), num_workers=1)
        """,
    )
    end = ended(stage.launch(script))
    report = stage.report()
    assert end.exit_code == 1 and report["cause"] == "exception", report
    assert report["sentence"].endswith("failed with Damaged: shard train-07.tar is damaged at byte 4096")


@pytest.mark.budget(processor_s=20)
def test_the_cause_is_told_though_a_peer_reports_its_lost_connection_first(stage: Stage) -> None:
    script = script_of(
        stage,
        "raise ZeroDivisionError('the cause')",
        """
        import contextlib, socket

        def lose_all_connections():
            "As the kernel does when a process ends."
            for number in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):  # it is no socket, or not connected
                    connection = socket.socket(fileno=os.dup(number))
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)

        try:
            train()
        finally:
            tell(f"{RANK}.failed")
            if RANK == 1:
                lose_all_connections()
                await_mark("0.failed")
        """,
    )
    end = ended(stage.launch(script))
    assert_told(stage, end, Fault("", 1, ("ZeroDivisionError: the cause",), ("exception",)))


@pytest.mark.nightly
@pytest.mark.budget(processor_s=20)
def test_a_worker_that_leaves_early_without_an_error_is_named(stage: Stage) -> None:
    end = ended(stage.launch(script_of(stage, "sys.exit(0)"), "--hang-timeout", str(HANG_TIMEOUT_S)))
    assert end.exit_code == 1
    assert "rank 1" in end.err.lower(), end.err
