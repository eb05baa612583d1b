"""A worker that waits where no exception comes notices that another one is gone."""

from __future__ import annotations

import os
import pickle
import threading
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import PeerLost
from paceline.train.session.peer_watch import PeerWatch
from tests.kit import workers as harness
from tests.kit.workers import join_world, run_ranks

LOST = 2
GENEROUS_S = 60.0
LAG_S = 4.0
"""By which one worker's run ends after the other's."""


def _join() -> dist.ProcessGroup:
    join_world(GENEROUS_S)
    group = dist.new_group(backend="gloo", timeout=timedelta(days=3000))
    assert isinstance(group, dist.ProcessGroup)
    return group


def wait_for_one_that_ends() -> dict[str, Any]:
    """In one worker: wait as in a kernel of NCCL's, which ends only when its communicator is aborted."""
    group = _join()
    aborted = threading.Event()
    watch = PeerWatch(group, torch.device("cpu"), aborted.set)
    watch.check()  # while all are there
    dist.barrier()
    if dist.get_rank() == LOST:
        os._exit(1)
    was_aborted = aborted.wait(GENEROUS_S)
    refused = "an update may be made"
    try:
        watch.check()
    except PeerLost as lost:
        refused = str(lost)
    cause = watch.cause_of(RuntimeError("what an aborted collective has left"))
    return {"aborted": was_aborted, "refused": refused, "rank": cause and cause.rank}


def test_all_notice_which_worker_is_gone_and_none_makes_an_update(tmp_path: Path) -> None:
    pipes, workers = {}, []
    for rank in range(5):
        receiver, sender = harness._CONTEXT.Pipe(duplex=False)
        arguments = (wait_for_one_that_ends, (), rank, 5, tmp_path / "store", sender)
        workers.append(harness._CONTEXT.Process(target=harness._worker, args=arguments, daemon=True))
        workers[-1].start()
        sender.close()
        pipes[receiver] = rank
    found = {}
    try:
        while pipes:
            ready = wait(list(pipes), timeout=2 * GENEROUS_S)
            assert ready, f"no answer from ranks {sorted(pipes.values())}"
            for pipe in ready:
                rank = pipes.pop(pipe)  # type: ignore[call-overload]
                if rank != LOST:
                    error, found[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                    assert not error, error
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    for of_rank in found.values():
        assert of_rank == {
            "aborted": True,
            "refused": "Rank 2 ended while this worker was waiting for it.",
            "rank": LOST,
        }
    assert sorted(found) == [0, 1, 3, 4]


def end_together() -> tuple[bool, int]:
    group = _join()
    aborted = threading.Event()
    watch = PeerWatch(group, torch.device("cpu"), aborted.set)
    dist.barrier()
    watch.close()
    watching = [thread for thread in threading.enumerate() if thread.name.startswith("paceline-watch")]
    own = ValueError("this worker's own")
    assert watch.cause_of(own) is None
    dist.destroy_process_group()
    return aborted.is_set(), len(watching)


def test_runs_that_end_lose_nobody() -> None:
    for world_size in (2, 3):
        assert run_ranks(end_together, world_size, timeout_s=2 * GENEROUS_S) == [(False, 0)] * world_size


def end_one_after_the_other() -> int:
    """The number of threads that still watch when this worker's run has ended."""
    watch = PeerWatch(_join(), torch.device("cpu"), lambda: None)
    if dist.get_rank() == 0:
        for thread in watch._threads.values():
            thread.join(GENEROUS_S)  # the other's run is over
        threading.Event().wait(LAG_S)  # on a busy machine
    watch.close()
    return sum(thread.is_alive() for thread in watch._threads.values())


def test_no_thread_watches_any_more_when_a_worker_ends_before_the_others() -> None:
    assert run_ranks(end_one_after_the_other, 2, timeout_s=3 * GENEROUS_S) == [0, 0]


class _OneThatIsLost(PeerWatch):
    """On a GPU, while this worker waits for a sum that is aborted then."""

    def __init__(self) -> None:
        self._device, self._lost = torch.device("cuda", 0), None

    def synchronize(self) -> None:
        self._lost = LOST


def test_no_update_stands_in_a_queue_behind_a_sum_that_may_be_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = _OneThatIsLost()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: watch)
    with pytest.raises(PeerLost, match=f"Rank {LOST} ended"):
        watch.check()
