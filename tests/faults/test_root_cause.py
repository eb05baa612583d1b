"""Which of several failures caused the others: the earliest that is not merely the loss of a peer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.diagnosis.failures import (
    Failure,
    WorkerProcess,
    describe_failure,
    place_in,
    root_cause,
    silent_node,
    write_note,
)
from paceline.launch.worker import count_oom_kills


def ending(rank: int, time: float, exit_code: int = 1, kind: str = "", asked_at: float | None = None) -> WorkerProcess:
    note = None
    if kind:
        note = Failure(time, f"{kind}: boom", "Traceback\n", is_consequence=kind == "PeerLost")
    return WorkerProcess(rank, 9, 100 + rank, "node", exit_code, time, asked_at, failure=note)


def raised(rank: int, time: float, asked_at: float | None = None) -> WorkerProcess:
    return ending(rank, time, kind="ValueError", asked_at=asked_at)


def lost_peer(rank: int, time: float, asked_at: float | None = None) -> WorkerProcess:
    return ending(rank, time, kind="PeerLost", asked_at=asked_at)


CASES: dict[str, tuple[list[WorkerProcess], int]] = {
    "one failed": ([ending(0, 1.0, 0), raised(1, 2.0)], 1),
    "the earliest": ([raised(0, 2.0), ending(1, 1.0, -9), raised(2, 3.0)], 1),
    "its consequence came earlier": ([lost_peer(0, 1.0), raised(1, 1.5), lost_peer(2, 1.1, asked_at=2.0)], 1),
    "killed when asked to end": ([ending(0, 2.5, -15, asked_at=2.0), lost_peer(1, 1.0), raised(2, 2.2, 2.1)], 1),
    "an exit code comes after its consequence": ([lost_peer(0, 1.0, asked_at=2.0), ending(1, 1.2, 3)], 1),
    "all lost their peers": ([lost_peer(0, 1.2), lost_peer(1, 1.0, asked_at=2.0)], 1),
    "a clock that is ahead": ([ending(0, 1.5, -15, asked_at=1.4), raised(1, 61.0)], 1),
    "all at once": ([raised(2, 1.0), raised(1, 1.0)], 1),
    "all after the stop": ([ending(0, 3.0, -9, asked_at=2.0), ending(1, 2.5, -15, asked_at=2.0)], 1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_found(name: str) -> None:
    endings, rank = CASES[name]
    for order in (endings, endings[::-1]):
        cause = root_cause(order)
        assert cause is not None and cause.rank == rank


times = st.floats(0, 10)


@st.composite
def endings(draw: st.DrawFn) -> list[WorkerProcess]:
    makers = [raised, lost_peer, lambda rank, time: ending(rank, time, 3), lambda rank, time: ending(rank, time, 0)]
    return [draw(st.sampled_from(makers))(rank, draw(times)) for rank in range(draw(st.integers(1, 7)))]


@given(endings(), times)
def test_the_cause_is_the_earliest_failure_of_its_own(ended: list[WorkerProcess], stopped_at: float) -> None:
    ended = [replace(ended[0], asked_at=stopped_at), *ended[1:]]
    failed = [one for one in ended if one.exit_code != 0]
    cause = root_cause(ended)
    if cause is None:
        assert not failed
        return
    assert cause in failed
    before = [one for one in failed if one.time <= stopped_at or not (one.is_consequence or one is ended[0])]
    own = [one for one in before if not one.is_consequence]
    if own:
        assert cause in own and cause.time == min(one.time for one in own)
    elif before:
        assert cause in before


DUMP = """\
Fatal Python error: Aborted

Thread 0x00007f72f2000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/home/kim/loader.py", line 7 in load

Thread 0x00007f72f27d5b80 (most recent call first):
  File "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/kim/train.py", line 19 in metrics
  File "/home/kim/train.py", line 30 in <module>

Extension modules: numpy.random.mtrand (total: 1)
"""


def test_the_place_of_a_crash_is_the_innermost_line_of_the_users_own() -> None:
    raised = (
        'Traceback (most recent call last):\n  File "/home/kim/first.py", line 2, in <module>\n    f()\nKeyError: 1\n'
    )
    assert place_in(raised + DUMP, -6) == "train.py, line 19"
    assert place_in(raised, 1) == place_in(raised, -15) == "first.py, line 2"
    assert place_in(raised, -9) == place_in(raised, 3) == place_in("", 1) == ""  # it was not the end


def test_workers_in_different_collectives_are_told_by_their_places(tmp_path: Path) -> None:
    """A backend ends the process of a worker that meets another collective, as after a loop with fewer steps."""
    write_note(tmp_path, WorkerProcess(0, 2, 100, "node", 1, 2.0, place="train.py, line 15"))
    write_note(tmp_path, WorkerProcess(1, 2, 101, "node", -6, 1.0, place="train.py, line 19"))
    report = describe_failure(tmp_path)
    assert report is not None and report.ranks == (1,)
    assert "SIGABRT at train.py, line 19, while rank 0 was at train.py, line 15" in report.sentence
    assert "different collectives" in report.next


def test_an_exception_is_told_with_the_peers_that_had_ended(tmp_path: Path) -> None:
    """A connection is closed by a peer whose loop had fewer steps."""
    write_note(tmp_path, ending(1, 1.0, 0))
    write_note(tmp_path, raised(0, 2.0))
    report = describe_failure(tmp_path)
    assert report is not None and report.ranks == (0,)
    assert "failed (rank 1 had ended without an error) with ValueError: boom" in report.sentence


def test_a_node_of_which_nothing_tells_how_its_workers_ended_is_lost(tmp_path: Path) -> None:
    """Ray and srun carry the agents of several nodes, and do not say which node is gone."""
    write_note(tmp_path, replace(lost_peer(0, 2.0), hostname="first"))
    lost = replace(ending(1, 3.0, -9), hostname="second")
    write_note(tmp_path, replace(lost, exit_code=None))
    report = describe_failure(tmp_path, silent_node(tmp_path, within_s=0.1))
    assert report is not None and (report.cause, report.ranks, report.hostname) == ("node_lost", (1,), "second")
    write_note(tmp_path, lost)
    assert silent_node(tmp_path, within_s=0.1) is None


def test_a_failure_that_cannot_be_noted_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a full disk."""
    (tmp_path / "workers").touch()
    write_note(tmp_path, ending(0, 1.0, 0))
    write_note(tmp_path, replace(ending(1, 1.0, 3), output="no data here"))
    told = "no data here\npaceline: rank 1 on node: ended with exit code 3 (not noted: "
    assert capsys.readouterr().err.startswith(told)


def test_a_kill_for_memory_is_told_with_what_helps(tmp_path: Path) -> None:
    for out_of_memory, words in ((True, "fewer samples"), (False, "has not counted")):
        write_note(tmp_path, WorkerProcess(0, 1, 100, "node", -9, 1.0, out_of_memory=out_of_memory))
        report = describe_failure(tmp_path)
        assert report is not None and words in report.next


def test_the_kernels_count_of_kills_for_memory_is_read(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text("1:cpu:/job\n0::/user.slice/job\n")
    assert count_oom_kills(7, tmp_path, tmp_path / "groups") == 0
    counters = tmp_path / "groups" / "user.slice" / "job" / "memory.events"
    counters.parent.mkdir(parents=True)
    counters.write_text("oom 5\noom_kill 3\nunder_oom 0\n")
    assert count_oom_kills(7, tmp_path, tmp_path / "groups") == 3
    assert count_oom_kills(8, tmp_path, tmp_path / "groups") == 0
