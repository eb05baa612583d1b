"""A worker that waits where no exception comes notices that another one is gone."""

from __future__ import annotations

import os
import pickle
import threading
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PeerLost
from paceline.train.peer_watch import PeerWatch
from tests.ranks import harness
from tests.ranks.harness import join_world, run_ranks

LOST = 2
GENEROUS_S = 60.0


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
    with watch.update():
        pass  # while all are there
    dist.barrier()
    if dist.get_rank() == LOST:
        os._exit(1)
    was_aborted = aborted.wait(GENEROUS_S)
    refused = ""
    try:
        with watch.update():
            refused = "an update was made"
    except PeerLost as lost:
        refused = str(lost)
    cause = watch.cause_of(RuntimeError("what an aborted collective has left"))
    return {"aborted": was_aborted, "refused": refused, "rank": cause and cause.rank, "whole": watch.is_whole}


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
            "whole": True,
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
