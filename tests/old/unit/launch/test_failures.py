"""Which of several deaths caused the others, and how it is told."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.failure_report import describe_failure
from paceline.launch.failures import Ending, Failure, is_consequence, root_cause
from paceline.launch.supervise import Outcome

LOST = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:18315"


def failure(type: str = "ValueError", message: str = "boom", *, rank: int = 0, time: float = 1.0) -> Failure:
    return Failure(rank=rank, pid=100 + rank, time=time, type=type, message=message, traceback="Traceback\n")


def ending(rank: int, time: float, exit_code: int = 1, note: Failure | None = None) -> Ending:
    return Ending(rank=rank, pid=100 + rank, exit_code=exit_code, time=time, failure=note)


def raised(rank: int, time: float) -> Ending:
    return ending(rank, time, note=failure(rank=rank, time=time))


def lost_peer(rank: int, time: float) -> Ending:
    return ending(rank, time, note=failure("RuntimeError", LOST, rank=rank, time=time))


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("RuntimeError", LOST),
        ("RuntimeError", "[x.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is typically"),
        ("RuntimeError", "[unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"),
        ("RuntimeError", "Wait timeout"),
        (
            "DistBackendError",
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3384, remote process exited or "
            "there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network "
            "error or a remote process exiting prematurely.",
        ),
        (
            "DistBackendError",
            "ncclSystemError: … Last error:\nsocketProgress: Connection closed by remote peer n1<571>",
        ),
        ("DistBackendError", "NCCL communicator was aborted on rank 0."),
        (
            "DistBackendError",
            "[PG ID 0 PG GUID 0 Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, "
            "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=60000) ran for 60008 milliseconds before timing out.",
        ),
        (
            "DistBackendError",
            "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key "
            "'0', but store->get('0') got error: Connection reset by peer",
        ),
        ("DistStoreError", "wait timeout after 60000ms, keys: /default_pg/0//cuda//0"),
        ("PeerLost", "Rank 2 ended while this worker was waiting for it."),
        ("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed."),
    ],
)
def test_what_torch_says_of_a_lost_peer_is_a_consequence(type: str, message: str) -> None:
    assert is_consequence(failure(type, message))


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("ValueError", "boom"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied"),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer"),  # a download's
        ("TimeoutError", "timed out waiting for the file"),
        ("DistBackendError", "NCCL error: invalid argument"),
        ("DistBackendError", "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'"),
    ],
)
def test_an_error_of_its_own_is_none(type: str, message: str) -> None:
    assert not is_consequence(failure(type, message))


def test_the_cause_wins_over_its_earlier_consequence() -> None:
    endings = [lost_peer(0, 1.0), raised(1, 1.5), lost_peer(2, 1.1)]
    assert root_cause(endings, stopped_at=2.0).rank == 1


def test_who_was_killed_by_the_launcher_is_no_cause() -> None:
    endings = [ending(0, 2.5, -signal.SIGTERM), lost_peer(1, 1.0), raised(2, 2.2)]
    assert root_cause(endings, stopped_at=2.0).rank == 1


def test_without_a_failure_there_is_no_cause() -> None:
    with pytest.raises(ValueError):
        root_cause([ending(0, 1.0, 0)], stopped_at=float("inf"))


times = st.floats(0, 10, allow_nan=False)
ends = st.builds(
    lambda kind, rank, time: {
        "well": ending(rank, time, 0),
        "code": ending(rank, time, 3),
        "raised": raised(rank, time),
        "lost": lost_peer(rank, time),
    }[kind],
    st.sampled_from(["well", "code", "raised", "lost"]),
    st.integers(0, 7),
    times,
)


@given(st.lists(ends, min_size=1, unique_by=lambda e: e.rank), times)
def test_the_root_is_the_earliest_independent_failure(endings: list[Ending], stopped_at: float) -> None:
    if not any(e.failed for e in endings):
        return
    root = root_cause(endings, stopped_at=stopped_at)
    assert root.failed
    independent = [
        e
        for e in endings
        if e.failed and e.time <= stopped_at and not (e.failure is not None and is_consequence(e.failure))
    ]
    if independent:
        assert root in independent and root.time == min(e.time for e in independent)
    assert root == root_cause(endings[::-1], stopped_at=stopped_at)


def tell(root: Ending, *others: Ending, stopped_at: float = 2.0) -> str:
    report = describe_failure(Outcome((root, *others), stopped_at), 1 + len(others), Path("/nowhere"))
    assert report is not None and report.ranks == (root.rank,)
    return report.sentence


def test_the_sentence_of_an_exception_is_one_line() -> None:
    note = failure(message="one\n   two")
    assert tell(ending(0, 1.0, note=note)) == "Rank 0 of 1 (pid 100) failed with ValueError: one two"
    note = failure("KeyboardError", "")
    assert tell(ending(0, 1.0, note=note)) == "Rank 0 of 1 (pid 100) failed with KeyboardError"
    assert len(tell(ending(0, 1.0, note=failure(message="x" * 10_000)))) < 500


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (3, "ended with exit code 3."),
        (143, "was ended by SIGTERM from outside this run (exit code 143)."),
        (-signal.SIGSEGV, "was killed by SIGSEGV."),
        (-signal.SIGRTMIN - 3, f"was killed by signal {signal.SIGRTMIN + 3}."),
    ],
)
def test_the_sentence_of_an_exit_names_code_or_signal(exit_code: int, words: str) -> None:
    assert tell(ending(0, 1.0, exit_code)) == f"Rank 0 of 1 (pid 100) {words}"


def test_the_sentence_of_a_lost_peer_says_where_the_others_were() -> None:
    lost = lost_peer(0, 1.0)
    words = "RuntimeError: Connection closed by peer [127.0.0.1]:18315"
    who = "(pid 100) lost touch with the other workers"
    assert tell(lost) == f"Rank 0 of 1 {who}: {words}"
    assert tell(lost, ending(1, 0.5, 0)) == f"Rank 0 of 2 {who} (rank 1 had ended without an error): {words}"
    busy = (ending(1, 2.5, 143), ending(2, 2.5, -signal.SIGKILL))
    assert tell(lost, *busy) == f"Rank 0 of 3 {who} (ranks 1, 2 kept it waiting): {words}"


@given(st.text(), st.text(), st.booleans())
def test_a_note_reads_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, message: str, text: str, is_user_error: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "failures" / "rank3.json"
    note = dataclasses.replace(failure(message=message), traceback=text, is_user_error=is_user_error)
    note.write(path)
    assert Failure.read(path) == note


@pytest.mark.parametrize("text", ["", '{"rank": 1', "[]", "3", '{"rank": 1}', '{"surprise": 1}'])
def test_half_a_note_is_no_note(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(text)
    assert Failure.read(path) is None
    assert Failure.read(tmp_path / "missing.json") is None
