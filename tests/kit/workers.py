"""Real worker processes for tests: forked from a server that has loaded once what they need, met through a file, on
loopback."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.kit.preloaded"])


def join_world(timeout_s: float) -> Any:
    """In a worker: the group of all of them, over Gloo."""
    import torch.distributed as dist

    from paceline import env

    facts = env.worker_facts()
    dist.init_process_group(
        "gloo",
        init_method=facts.init_method,
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return dist.group.WORLD


def in_turn(train: Callable[..., Outcome], cases: Iterable[tuple[Any, ...]]) -> list[Outcome]:
    """What `train(*case)` returns of each case, by one run after the other in this process; a collective."""
    return [train(*case) for case in cases]


def fork_process(function: Callable[..., None], *args: Any) -> ForkServerProcess:
    """A process that has loaded what workers load, and is none."""
    process = _CONTEXT.Process(target=function, args=args, daemon=False)
    process.start()
    return process


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, may_die: Collection[int] = ()
) -> list[Any]:
    """What `function(*args)` returns in each of `world_size` workers; it finds its rank where a worker does.

    A worker's exception fails the test with its traceback; whoever is left after `timeout_s` is killed. Of a worker in
    `may_die` that ends without a word, the result is None.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in its list

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
    pipes, workers = [], []
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        worker = _CONTEXT.Process(
            target=_worker, args=(function, args, rank, world_size, store.port, sender), daemon=False
        )
        worker.start()
        sender.close()
        pipes.append(receiver)
        workers.append(worker)
    try:
        return _collect(pipes, time.monotonic() + timeout_s, may_die)
    finally:
        for worker in workers:
            worker.join(timeout=5)
            if worker.is_alive():
                worker.kill()
                worker.join()


def _collect(pipes: list[Connection], deadline: float, may_die: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and not errors:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no answer from ranks {sorted(open_pipes.values())}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                error, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                error, value = None if rank in may_die else "died without a word", None
            if error:
                errors[rank] = error
            else:
                results[rank] = value
    if errors:
        raise AssertionError("\n".join(f"rank {rank}: {error}" for rank, error in errors.items()))
    return [results[rank] for rank in range(len(pipes))]


def _worker(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    sender: Connection,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        PACELINE_DEVICE="cpu",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    # As in a worker that was launched: loaders are forked. This process would start them as it was started itself.
    multiprocessing.set_start_method("fork", force=True)
    import torch

    from paceline import heartbeat

    torch.set_num_threads(1)
    answer: tuple[str | None, Any]
    try:
        answer = (None, function(*args))
    except BaseException:
        answer = (traceback.format_exc(), None)
    shutil.rmtree(heartbeat.own_file().parent, ignore_errors=True)  # this process ends without functions of `atexit`
    # Plain pickle: torch's own way of sending tensors would keep them in memory that dies with this process.
    sender.send_bytes(pickle.dumps(answer))
