"""What is told of a run that failed."""

from __future__ import annotations

import json
import math
import signal
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.failure_report import FailureReport, describe_failure, user_mistake
from paceline.launch.failures import Ending, Failure, log_path, stack_path
from paceline.launch.hang import Hang, WorkerState
from paceline.launch.run_workers import prepare, worker_failed
from paceline.launch.supervise import NodeLoss, Outcome

LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:18315"
HANG_AT, STOPPED_AT = 9.0, 10.0
"""The stacks take a moment between them."""
SCREEN_LINES, SCREEN_COLUMNS = 50, 160
"""A tall window; 24 lines would not hold a traceback."""


def note(
    rank: int, time: float, type: str = "ValueError", message: str = "boom", is_user_error: bool = False
) -> Failure:
    return Failure(rank, 100 + rank, time, type, message, "Traceback\n  line 3\nValueError: boom\n", is_user_error)


def ending(rank: int, time: float, exit_code: int = 1, failure: Failure | None = None) -> Ending:
    return Ending(rank, 100 + rank, exit_code, time, failure, step=4, collective="all_reduce number 9", hostname="n1")


def raised(rank: int, time: float) -> Ending:
    return ending(rank, time, 1, note(rank, time))


def lost_peer(rank: int, time: float) -> Ending:
    return ending(rank, time, 1, note(rank, time, "RuntimeError", LOST))


def asked(rank: int) -> Ending:
    return ending(rank, STOPPED_AT + 0.1, 128 + signal.SIGTERM)


def waits(rank: int) -> WorkerState:
    return WorkerState(
        rank=rank,
        pid=100 + rank,
        hostname="n1",
        step=4,
        collective="all_reduce number 9",
        inside_s=3.0,
        heartbeat_age_s=0.1,
    )


def computes(rank: int) -> WorkerState:
    return WorkerState(
        rank=rank, pid=100 + rank, hostname="n1", step=4, collective="all_reduce number 8", heartbeat_age_s=0.1
    )


HUNG = Outcome(
    (asked(0), asked(1), asked(2)),
    STOPPED_AT,
    hang=Hang("hung", (1,), (0, 2), 3.0),
    hang_at=HANG_AT,
    states=(waits(0), computes(1), waits(2)),
    stacks=((1, 'File "train.py", line 7 in spin'),),
)
LOSS = NodeLoss("gpu2", (2, 3), time=9.0, silent_s=3.2)


def described(outcome: Outcome, run_dir: Path = Path("/nowhere"), *, answers: bool = False) -> FailureReport:
    report = describe_failure(outcome, 4, run_dir, answers=answers)
    assert report is not None
    assert "\n" not in report.sentence
    assert report.next and "{" not in report.next
    return report


def test_a_run_that_went_well_has_no_report() -> None:
    assert describe_failure(Outcome((ending(0, 1.0, 0),), math.inf), 1, Path("/nowhere")) is None


@pytest.mark.parametrize(
    ("root", "cause", "words"),
    [
        (raised(1, 5.0), "exception", "Rank 1 of 4 (pid 101 on n1) failed with ValueError: boom"),
        (ending(1, 5.0, 3), "exit", "Rank 1 of 4 (pid 101 on n1) ended with exit code 3."),
        (ending(1, 5.0, -signal.SIGSEGV), "signal", "was killed by SIGSEGV"),
        (replace(ending(1, 5.0, -signal.SIGKILL), out_of_memory=True), "out_of_memory", "by the kernel: out of memory"),
        (lost_peer(1, 5.0), "lost_touch", "lost touch with the other workers"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_the_end_of_one_worker(root: Ending, cause: str, words: str) -> None:
    report = described(Outcome((root, asked(0)), STOPPED_AT, states=(waits(0), waits(2))))
    assert report.cause == cause
    assert words in report.sentence
    assert (report.ranks, report.hostname, report.pid) == ((1,), "n1", 101)
    assert (report.exit_code, report.step) == (root.exit_code, 4)
    assert report.noticed_at == STOPPED_AT
    assert report.workers == (
        "rank 1: ended after 4 steps; its last collective was all_reduce number 9",
        "rank 0 (pid 100): step 4, in all_reduce number 9 for 3.0 s",
        "rank 2 (pid 102): step 4, in all_reduce number 9 for 3.0 s",
    )


def test_each_worker_is_listed_once_whether_it_ended_before_the_failure_was_seen_or_after() -> None:
    outcome = Outcome((lost_peer(0, 4.0), raised(1, 5.0)), STOPPED_AT, states=(computes(1), waits(2)))
    assert described(outcome).workers == (
        "rank 1: ended after 4 steps; its last collective was all_reduce number 9",
        "rank 0: ended after 4 steps; its last collective was all_reduce number 9",
        "rank 2 (pid 102): step 4, in all_reduce number 9 for 3.0 s",
    )
    hung = described(replace(HUNG, endings=(*HUNG.endings, ending(3, 8.0, 0))))
    assert [line[:6] for line in hung.workers] == ["rank 1", "rank 0", "rank 2", "rank 3"]


def test_workers_that_ended_before_their_peers_node_was_seen_to_be_lost_tell_the_step() -> None:
    report = described(Outcome((lost_peer(0, 8.9), lost_peer(1, 8.9)), 9.0, losses=(LOSS,)))
    assert report.step == 4
    assert [line[:13] for line in report.workers] == ["ranks 2, 3: l", "rank 0: ended", "rank 1: ended"]


def test_a_second_sentence_begins_behind_a_full_stop() -> None:
    report = described(Outcome((raised(1, 5.0),), STOPPED_AT))
    more = "The run was started again once."
    assert str(worker_failed(report, None, more)).endswith("failed with ValueError: boom. " + more)
    assert str(worker_failed(report, None)).endswith("boom")


@pytest.mark.parametrize(
    ("loss", "answers", "cause", "words"),
    [
        (LOSS, False, "node_silent", "Node gpu2 (ranks 2, 3) has been silent for 3.2 s"),
        (replace(LOSS, silent_s=None), True, "agent_lost", "The agent on node gpu2 was killed or ended"),
        (replace(LOSS, silent_s=None), False, "node_down", "Node gpu2 (ranks 2, 3) went down"),
    ],
)
def test_a_lost_node(loss: NodeLoss, answers: bool, cause: str, words: str) -> None:
    outcome = Outcome((lost_peer(0, 9.5), asked(1)), 9.0, losses=(loss,), states=(waits(0), replace(waits(1), step=3)))
    report = described(outcome, answers=answers)
    assert report.cause == cause
    assert report.sentence.startswith(words)
    assert (report.ranks, report.hostname, report.step, report.noticed_at) == ((2, 3), "gpu2", 3, 9.0)
    assert (report.pid, report.exit_code) == (None, None)
    assert "gpu2" in report.next
    assert report.workers[0] == "ranks 2, 3: lost with node gpu2"


def test_one_that_hangs() -> None:
    report = described(HUNG)
    assert report.cause == "hung"
    assert report.sentence == ("Rank 1 of 4 (pid 101 on n1) hangs in step 5: ranks 0, 2 have waited for it for 3.0 s.")
    assert (report.ranks, report.pid, report.exit_code, report.step) == ((1,), 101, None, 4)
    assert report.noticed_at == HANG_AT
    assert report.evidence == 'Stack of rank 1:\nFile "train.py", line 7 in spin'
    assert report.workers[0] == "rank 1 (pid 101): step 4, in no collective; its last was all_reduce number 8"


def test_several_that_hang() -> None:
    hang = Hang("hung", (1, 2, 3), (0,), 3.0)
    report = described(replace(HUNG, hang=hang, states=(waits(0), *map(computes, (1, 2, 3)))))
    assert "ranks 2, 3" in report.sentence
    assert report.sentence.endswith("in step 5: rank 0 has waited for it for 3.0 s.")
    assert report.ranks == (1, 2, 3)


@pytest.mark.parametrize(
    ("waiting", "words"),
    [((), "(SIGSTOP)."), ((0,), "(SIGSTOP); rank 0 waits for it."), ((0, 2), "(SIGSTOP); ranks 0, 2 wait for it.")],
)
def test_one_that_was_stopped(waiting: tuple[int, ...], words: str) -> None:
    states = (waits(0), replace(computes(1), stopped_s=4.0), waits(2))
    report = described(replace(HUNG, hang=Hang("stopped", (1,), waiting, 4.0), states=states, stacks=((1, ""),)))
    assert report.cause == "stopped"
    assert report.sentence.startswith("Rank 1 of 4 (pid 101 on n1) has been stopped for 4.0 s ")
    assert report.sentence.endswith(words)
    assert "kill -CONT 101" in report.next
    assert report.evidence == ""


def test_all_that_wait_for_each_other() -> None:
    ranks = (0, 1, 2, 3)
    outcome = Outcome(
        tuple(map(asked, ranks)),
        STOPPED_AT,
        hang=Hang("mismatch", ranks, ranks, 3.0),
        hang_at=HANG_AT,
        states=tuple(map(waits, ranks)),
    )
    report = described(outcome)
    assert report.cause == "mismatch"
    assert report.sentence.startswith("All 4 workers have waited for each other for 3.0 s")
    assert report.ranks == ranks


def test_some_that_wait_after_others_have_ended_are_not_all_workers() -> None:
    """Rank 0 left early and well; the others wait for each other in a group of their own."""
    ranks = (1, 2, 3)
    outcome = Outcome(
        (ending(0, 5.0, 0), *map(asked, ranks)),
        STOPPED_AT,
        hang=Hang("mismatch", ranks, ranks, 3.0),
        hang_at=HANG_AT,
        states=tuple(map(waits, ranks)),
    )
    assert not described(outcome).sentence.startswith("All 4 workers")


def test_a_loss_comes_before_what_its_victims_say() -> None:
    victims = (lost_peer(0, 8.0), lost_peer(1, 9.5))  # noticed by a peer before it was by us
    assert described(Outcome(victims, 9.0, losses=(LOSS,))).cause == "node_silent"
    assert described(Outcome((raised(0, 9.5), asked(1)), 9.0, losses=(LOSS,))).cause == "node_silent"


def test_an_error_that_came_before_the_loss_is_the_cause() -> None:
    report = described(Outcome((raised(0, 8.0), lost_peer(1, 8.5)), 9.0, losses=(LOSS,)))
    assert (report.cause, report.ranks) == ("exception", (0,))


def test_a_loss_while_the_run_was_ending_or_without_workers_is_no_cause() -> None:
    for loss in (replace(LOSS, was_stopping=True), replace(LOSS, ranks=())):
        assert described(Outcome((raised(0, 9.5),), STOPPED_AT, losses=(loss,))).cause == "exception"
        assert describe_failure(Outcome((ending(0, 9.5, 0),), math.inf, losses=(loss,)), 4, Path("/x")) is None


def test_a_loss_comes_before_the_hang_it_causes_and_the_hang_before_its_victims() -> None:
    assert described(replace(HUNG, losses=(LOSS,))).cause == "node_silent"
    victims = (lost_peer(0, 10.5), asked(1), lost_peer(2, 10.6))
    assert described(replace(HUNG, endings=victims)).cause == "hung"


def test_an_error_that_came_before_the_hang_was_found_is_the_cause() -> None:
    """Rank 1 kept the others waiting and raised in the moment before somebody looked."""
    report = described(replace(HUNG, endings=(asked(0), raised(1, HANG_AT - 0.01), asked(2))))
    assert (report.cause, report.ranks) == ("exception", (1,))


def test_a_mistake_of_the_user_needs_no_report() -> None:
    mistake = ending(0, 5.0, 2, note(0, 5.0, "JobError", "There is no key 'lr'.", is_user_error=True))
    outcome = Outcome((mistake, lost_peer(1, 5.1)), STOPPED_AT)
    assert user_mistake(outcome) == "There is no key 'lr'."
    assert user_mistake(replace(outcome, endings=(raised(0, 5.0),))) is None
    assert user_mistake(replace(outcome, losses=(replace(LOSS, time=4.0),))) is None
    # A node that is lost later, as one that hangs later, is not why the run failed.
    assert user_mistake(replace(outcome, losses=(LOSS,))) == "There is no key 'lr'."
    assert user_mistake(replace(outcome, hang=HUNG.hang, hang_at=4.0)) is None
    assert user_mistake(replace(outcome, endings=(ending(0, 5.0, 0),))) is None


def test_the_evidence_of_each_kind_of_end(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log_path(tmp_path, 1).write_text("".join(f"line {number}\n" for number in range(100)))
    stack_path(tmp_path, 1).write_text("Fatal Python error: Segmentation fault\n")

    def evidence(root: Ending) -> str:
        return described(Outcome((root,), STOPPED_AT), tmp_path).evidence

    assert evidence(raised(1, 5.0)).endswith("ValueError: boom\n")
    assert evidence(ending(1, 5.0, 3)) == "".join(f"line {number}\n" for number in range(70, 100))
    assert evidence(ending(1, 5.0, -signal.SIGSEGV)).startswith("Fatal Python error: Segmentation fault\nline 70\n")
    assert evidence(ending(0, 5.0, 3)) == ""  # no log of its own


def num_rows(report: FailureReport) -> int:
    """On a terminal that breaks long lines."""
    return sum(max(1, math.ceil(len(line) / SCREEN_COLUMNS)) for line in report.text().splitlines())


@pytest.mark.parametrize("num_workers", [2, 8, 64])
def test_the_text_fits_one_screen(num_workers: int) -> None:
    ranks = range(num_workers)
    outcome = Outcome(
        tuple(map(asked, ranks)),
        STOPPED_AT,
        hang=Hang("hung", (1,), tuple(rank for rank in ranks if rank != 1), 3.0),
        hang_at=HANG_AT,
        states=tuple(computes(rank) if rank == 1 else waits(rank) for rank in ranks),
        stacks=((1, "".join(f'  File "train.py", line {number} in f\n' for number in range(200))),),
    )
    report = described(outcome)
    assert report.sentence in report.text() and report.next in report.text()
    assert "rank 1 (pid 101)" in report.text() and "line 199" in report.text()
    assert num_rows(report) <= SCREEN_LINES


def test_the_text_begins_with_the_sentence_and_counts_steps_in_english() -> None:
    report = replace(described(HUNG), step=1)
    assert report.text().splitlines()[:2] == [report.sentence, ""]
    assert "After     1 step\n" in report.text()
    assert "After     2 steps\n" in replace(report, step=2).text()
    assert "After" not in replace(report, step=None).text()
    assert "Evidence" not in replace(report, evidence="").text()
    assert "The workers" not in replace(report, workers=()).text()


def test_files_are_their_users_alone_and_read_back(tmp_path: Path) -> None:
    report = replace(described(HUNG), evidence="naïve \N{SNOWMAN}")
    report.save(tmp_path)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {
        "failure.json": 0o600,
        "failure.txt": 0o600,
    }
    written = json.loads((tmp_path / "failure.json").read_text())
    assert FailureReport(**written | {"ranks": tuple(written["ranks"]), "workers": tuple(written["workers"])}) == report
    assert (tmp_path / "failure.txt").read_text() == report.text()


def test_a_shorter_report_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    report = described(HUNG)
    replace(report, evidence="x" * 10_000).save(tmp_path)
    report.save(tmp_path)
    assert (tmp_path / "failure.txt").read_text() == report.text()
    report.save(tmp_path, "failure-1")
    for _ in range(2):
        prepare(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"logs", "failures"}


ends = st.builds(
    lambda kind, rank, time: {
        "well": ending(rank, time, 0),
        "code": ending(rank, time, 3),
        "raised": raised(rank, time),
        "lost": lost_peer(rank, time),
        "killed": ending(rank, time, -signal.SIGKILL),
    }[kind],
    st.sampled_from(["well", "code", "raised", "lost", "killed"]),
    st.integers(0, 3),
    st.floats(0, 20),
)
losses = st.builds(
    NodeLoss, st.just("gpu2"), st.sampled_from([(), (7,)]), st.floats(0, 20), st.none() | st.floats(1, 9), st.booleans()
)


@given(st.lists(ends, max_size=4, unique_by=lambda e: e.rank), st.lists(losses, max_size=2), st.booleans())
def test_every_failed_run_has_a_cause(endings: list[Ending], lost: list[NodeLoss], was_stopped: bool) -> None:
    outcome = Outcome(tuple(endings), STOPPED_AT if was_stopped else math.inf, losses=tuple(lost))
    report = describe_failure(outcome, 4, Path("/nowhere"))
    is_failed = any(one.failed for one in endings) or any(loss.ranks and not loss.was_stopping for loss in lost)
    assert (report is not None) == is_failed
    if report is not None:
        assert json.loads(json.dumps({"noticed_at": report.noticed_at}, allow_nan=False))
        assert report.text().endswith("\n")
