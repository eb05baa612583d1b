"""The asynchronous parameter server beside synchronous training, on four workers of which one is three times slower.

    python benchmarks/async_server.py [--shard-ms 50] [--batches 24] [--rounds 3]

Every worker *sleeps* for the time a shard takes, so that four of them can share two cores; the gradients, as large as
LeNet's, really travel. Synchronous means: every worker always has its share of each batch and all wait for the slowest
(an all_reduce).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import models
from paceline.comm.asynchronous import AsynchronousWorker, ServerSettings, UpdateSchedule
from paceline.spec import ModelSpec

WORLD_SIZE = 4
SLOW_RANK, SLOWDOWN = 3, 3
NUM_SHARDS = 8
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    """One run of four workers."""

    staleness: int | None = None
    """None: synchronous by all_reduce."""
    num_servers: int = 1
    shard_s: float = 0.2
    num_batches: int = 12


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shard-ms", type=float, default=200.0, help="how long a shard takes")
    options.add_argument("--batches", type=int, default=12, help="global batches of a run for speed")
    options.add_argument("--cases", default="", help="only the cases with this text in their name, and the base")
    options.add_argument("--rounds", type=int, default=3, help="alternating runs to take the median speed of")
    chosen = options.parse_args()
    print_speeds(chosen.rounds, chosen.shard_ms / 1e3, chosen.batches, chosen.cases)


def print_speeds(rounds: int, shard_s: float, num_batches: int, wanted: str) -> None:
    cases = {
        "synchronous, all_reduce": Case(),
        "staleness 0, 1 server": Case(0),
        "staleness 1, 1 server": Case(1),
        "staleness 4, 1 server": Case(4),
        "staleness 4, 4 servers": Case(4, num_servers=4),
    }
    cases = {
        name: replace(case, shard_s=shard_s, num_batches=num_batches)
        for name, case in cases.items()
        if wanted in name or case.staleness is None
    }
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            speeds[name].append(run(case))
    base = statistics.median(speeds["synchronous, all_reduce"])
    ideal = (WORLD_SIZE - 1 + 1 / SLOWDOWN) / shard_s
    print(
        f"| {NUM_SHARDS} shards of {1e3 * shard_s:.0f} ms a batch, one worker {SLOWDOWN}x slower | shards/s | ratio |"
    )
    print("|---|---|---|")
    for name, values in speeds.items():
        print(f"| {name} | {statistics.median(values):.1f} | {statistics.median(values) / base:.2f} |")
    print(f"| sum of the workers' speeds | {ideal:.1f} | {ideal / base:.2f} |\n", flush=True)


def run(case: Case) -> float:
    """Shards a second of four workers; each has one thread, and they connect on loopback."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.rpc", "torch._dynamo"])
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(rank, case, f"{folder}/store", sender)) for rank in range(WORLD_SIZE)
        ]
        for worker in workers:
            worker.start()
        try:
            if not receiver.poll(900):
                raise TimeoutError(f"{case} did not end")
            result: float = receiver.recv()
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()
    return result


def work(rank: int, case: Case, store: str, sender: Connection) -> None:
    """What one worker does."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    result = speed(rank, case)
    if rank == 0:
        sender.send(result)
    dist.destroy_process_group()


def lenet() -> nn.Module:
    torch.manual_seed(0)
    return models.build(ModelSpec("lenet"))


@contextmanager
def opened(
    optimizer: torch.optim.Optimizer, case: Case, schedule: UpdateSchedule, staleness: int
) -> Iterator[AsynchronousWorker]:
    group = dist.new_group(timeout=timedelta(days=1))
    worker = AsynchronousWorker(optimizer, schedule, ServerSettings(staleness, case.num_servers, TIMEOUT_S), group)
    yield worker
    worker.close()


def speed(rank: int, case: Case) -> float:
    """Shards a second, from the first batch that is finished to the last."""
    shard_s = case.shard_s * (SLOWDOWN if rank == SLOW_RANK else 1)
    model = lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def compute(_batch: int = 0, _shard: int = 0) -> tuple[Tensor, float]:
        time.sleep(shard_s)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return torch.zeros(1), 1.0

    finished_at_s: list[float] = []
    if case.staleness is None:
        for _ in synchronously(model, optimizer, compute, case.num_batches):
            finished_at_s.append(time.monotonic())
    else:
        with opened(optimizer, case, UpdateSchedule(lambda _batch: NUM_SHARDS), case.staleness) as server:
            for _ in server.work(compute, case.num_batches):
                finished_at_s.append(time.monotonic())
    elapsed_s = finished_at_s[-1] - finished_at_s[0]
    return NUM_SHARDS * (case.num_batches - 1) / elapsed_s


def synchronously(
    model: nn.Module, optimizer: torch.optim.Optimizer, compute: Callable[[], object], num_batches: int
) -> Iterator[None]:
    """Every worker has its share of every batch; all add their gradients and make the same update."""
    parameters = list(model.parameters())
    for _ in range(num_batches):
        for _ in range(NUM_SHARDS // WORLD_SIZE):
            compute()
        total = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        dist.all_reduce(total)
        for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view(parameter.shape)
        optimizer.step()
        yield


if __name__ == "__main__":
    main()
