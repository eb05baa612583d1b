"""Which of several failures caused the others: the earliest that is not merely the loss of a peer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.failures import Ending, Failure, is_consequence, root_cause
from paceline.launch.out_of_memory import count_oom_kills

LOST = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:18315"


def failure(kind: str, message: str, rank: int = 0, time: float = 1.0) -> Failure:
    return Failure(rank=rank, pid=100 + rank, time=time, type=kind, message=message, traceback="Traceback\n")


def ending(rank: int, time: float, exit_code: int = 1, note: Failure | None = None) -> Ending:
    return Ending(rank=rank, pid=100 + rank, exit_code=exit_code, time=time, failure=note)


def raised(rank: int, time: float) -> Ending:
    return ending(rank, time, note=failure("ValueError", "boom", rank, time))


def lost_peer(rank: int, time: float) -> Ending:
    return ending(rank, time, note=failure("RuntimeError", LOST, rank, time))


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3384, "
CONSEQUENCES = [
    ("RuntimeError", LOST),
    ("RuntimeError", "[x.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is typically"),
    ("RuntimeError", "[unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"),
    ("RuntimeError", "Wait timeout"),
    ("DistBackendError", NCCL + "remote process exited or there was a network error, NCCL version 2.27.5"),
    ("DistBackendError", "ncclSystemError: …\nsocketProgress: Connection closed by remote peer n1<571>"),
    ("DistBackendError", "NCCL communicator was aborted on rank 0."),
    ("DistBackendError", "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9) ran for 60008 ms"),
    ("DistBackendError", "ncclUniqueId from [0] …, but store->get('0') got error: Connection reset by peer"),
    ("DistStoreError", "wait timeout after 60000ms, keys: /default_pg/0//cuda//0"),
    ("DistNetworkError", "Failed to recv, got 0 bytes. Connection was likely closed."),
    ("PeerLost", "Rank 2 ended while this worker was waiting for it."),
]
CAUSES = [
    ("ValueError", "boom"),
    ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),  # of a download
    ("TimeoutError", "timed out waiting for the file"),
    ("DistBackendError", "NCCL error: invalid argument"),
    ("DistBackendError", "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'"),
]


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [(*one, True) for one in CONSEQUENCES] + [(*one, False) for one in CAUSES],
)
def test_only_what_torch_says_of_a_lost_peer_is_a_consequence(kind: str, message: str, expected: bool) -> None:
    assert is_consequence(failure(kind, message)) is expected


NEVER = math.inf
CASES: dict[str, tuple[list[Ending], float, int]] = {
    "one failed": ([ending(0, 1.0, 0), raised(1, 2.0)], NEVER, 1),
    "the earliest": ([raised(0, 2.0), ending(1, 1.0, -9), raised(2, 3.0)], NEVER, 1),
    "its consequence came earlier": ([lost_peer(0, 1.0), raised(1, 1.5), lost_peer(2, 1.1)], 2.0, 1),
    "killed by the launcher": ([ending(0, 2.5, -15), lost_peer(1, 1.0), raised(2, 2.2)], 2.0, 1),
    "an exit code comes after its consequence": ([lost_peer(0, 1.0), ending(1, 1.2, 3)], 2.0, 1),
    "all lost their peers": ([lost_peer(0, 1.2), lost_peer(1, 1.0)], 2.0, 1),
    "all at once": ([raised(2, 1.0), raised(1, 1.0)], NEVER, 1),
    "all after the stop": ([ending(0, 3.0, -9), ending(1, 2.5, -15)], 2.0, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_found(name: str) -> None:
    endings, stopped_at, rank = CASES[name]
    assert root_cause(endings, stopped_at=stopped_at).rank == rank
    assert root_cause(endings[::-1], stopped_at=stopped_at).rank == rank


times = st.floats(0, 10)


@st.composite
def endings(draw: st.DrawFn) -> list[Ending]:
    makers = [raised, lost_peer, lambda rank, time: ending(rank, time, 3), lambda rank, time: ending(rank, time, 0)]
    return [draw(st.sampled_from(makers))(rank, draw(times)) for rank in range(draw(st.integers(1, 7)))]


@given(endings(), times)
def test_the_cause_is_the_earliest_failure_of_its_own(ended: list[Ending], stopped_at: float) -> None:
    failed = [one for one in ended if one.exit_code != 0]
    if not failed:
        with pytest.raises(ValueError):
            root_cause(ended, stopped_at=stopped_at)
        return
    cause = root_cause(ended, stopped_at=stopped_at)
    assert cause in failed
    before = [one for one in failed if one.time <= stopped_at]
    own = [one for one in before if one.failure is None or one.failure.type != "RuntimeError"]
    if own:
        assert cause in own and cause.time == min(one.time for one in own)
    elif before:
        assert cause in before


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("5:memory:/job\n1:cpu:/\n", "memory/job/memory.oom_control"),
        ("0::/user.slice/job\n", "user.slice/job/memory.events"),
        ("0::/job (deleted)\n", "job/memory.events"),
        ("1:cpu:/job\n0::/job\n", "unified/job/memory.events"),
    ],
    ids=["version 1", "version 2", "removed", "both"],
)
def test_the_kernels_count_of_kills_for_memory_is_read(tmp_path: Path, cgroup: str, file: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(cgroup)
    assert count_oom_kills(7, tmp_path, tmp_path / "groups") is None
    counters = tmp_path / "groups" / file
    counters.parent.mkdir(parents=True)
    counters.write_text("oom 5\noom_kill 3\nunder_oom 0\n")
    assert count_oom_kills(7, tmp_path, tmp_path / "groups") == 3
    assert count_oom_kills(8, tmp_path, tmp_path / "groups") is None
