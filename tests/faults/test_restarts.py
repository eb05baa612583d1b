"""`--max-restarts` starts all workers again after a failure, as often as it says, and a user hears of each."""

from __future__ import annotations

import signal

import pytest

from tests.kit.stage import EXCEPTION, SIGKILL, Fault, Stage, ended

ATTEMPT = """
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
tell(f"{RANK}.attempt-{ATTEMPT}")
"""


def attempts(stage: Stage) -> list[str]:
    return sorted(mark.name for mark in stage.folder.glob("*.attempt-*"))


@pytest.mark.parametrize("fault", [SIGKILL, EXCEPTION], ids=["SIGKILL", "an exception"])
def test_all_workers_start_again_after_one_has_failed(stage: Stage, fault: Fault) -> None:
    script = stage.script(
        ATTEMPT,
        f"""
        if ATTEMPT == 0:
            if RANK == 1:
                await_mark("0.attempt-0")
                {fault.does}
            park()
        sys.stdout.write(f"done by {{RANK}}\\n")  # at once: two workers write
        """,
    )
    end = ended(stage.launch(script, "--max-restarts", "1"))
    assert end.exit_code == 0, end
    assert attempts(stage) == [f"{rank}.attempt-{attempt}" for rank in (0, 1) for attempt in (0, 1)]
    assert "done by 0" in end.out
    assert "Rank 1 of 2" in end.err and "restart 1" in end.err, end.err


def test_a_run_that_fails_again_and_again_ends_with_its_last_failure(stage: Stage) -> None:
    script = stage.script(
        ATTEMPT,
        """
        if RANK == 1:
            await_mark(f"0.attempt-{ATTEMPT}")
            sys.exit(3 + ATTEMPT)
        park()
        """,
    )
    end = ended(stage.launch(script, "--max-restarts", "1"))
    assert end.exit_code == 4, end
    assert len(attempts(stage)) == 4
    report = stage.report()
    assert (report["cause"], report["ranks"], report["exit_code"]) == ("exit", [1], 4)
    assert "exit code 4" in end.err


def test_a_run_that_is_asked_to_end_does_not_start_again(stage: Stage) -> None:
    launcher = stage.launch(stage.script(ATTEMPT, 'tell(f"{RANK}.ready")', "park()"), "--max-restarts", "3")
    stage.await_marks("0.ready", "1.ready")
    launcher.send_signal(signal.SIGTERM)
    assert ended(launcher).exit_code == 143
    assert attempts(stage) == ["0.attempt-0", "1.attempt-0"]
