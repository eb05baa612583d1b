"""The asynchronous parameter server beside synchronous training, on four workers of which one is three times slower.

    python benchmarks/async_server.py --data DIR                DIR holds MNIST's four files
    python benchmarks/async_server.py --shard-ms 50 [--busy 4]  speeds alone, perhaps beside processes that compute

Speed: every worker *sleeps* for the time a shard takes, so that four of them can share two cores; the gradients, as
large as LeNet's, really travel. Synchronous means: every worker always has its share of each batch and all wait for
the slowest (an all_reduce). Accuracy: LeNet on MNIST with real computing, the slow worker computing each shard three
times, against the same at staleness 0, which is synchronous training.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from busy_machine import neighbour
from torch import Tensor, nn

from paceline import data, models
from paceline.comm.asynchronous import AsynchronousWorker, ServerSettings, UpdateSchedule
from paceline.data import ArrayReader, ArraySet
from paceline.data.order import ShuffledOrder
from paceline.parallel.assignment import shard_sizes
from paceline.spec import DataSpec, Job, ModelSpec, OptimSpec
from paceline.train.optimizers.schedule import lr_factor

WORLD_SIZE = 4
SLOW_RANK, SLOWDOWN = 3, 3
NUM_SHARDS = 8
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    """One run of four workers."""

    what: str
    staleness: int | None = None
    """None: synchronous by all_reduce."""
    num_servers: int = 1
    shard_s: float = 0.2
    num_batches: int = 12
    epochs: int = 2
    seed: int = 0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", help="the directory with MNIST's files; without it, speeds alone")
    options.add_argument("--shard-ms", type=float, default=200.0, help="how long a shard takes")
    options.add_argument("--batches", type=int, default=12, help="global batches of a run for speed")
    options.add_argument("--busy", type=int, default=0, help="processes that compute all the time beside the workers")
    options.add_argument("--cases", default="", help="only the cases with this text in their name, and the base")
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--seeds", type=int, default=3, help="runs to average accuracies over")
    options.add_argument("--rounds", type=int, default=3, help="alternating runs to take the median speed of")
    chosen = options.parse_args()
    with ExitStack() as load:
        for _ in range(chosen.busy):
            load.enter_context(neighbour())
        print_speeds(chosen.rounds, chosen.shard_ms / 1e3, chosen.batches, chosen.cases)
    if chosen.data is not None:
        print_accuracies(chosen.data, chosen.seeds, chosen.epochs)


def print_speeds(rounds: int, shard_s: float, num_batches: int, wanted: str) -> None:
    cases = {
        "synchronous, all_reduce": Case("speed"),
        "staleness 0, 1 server": Case("speed", 0),
        "staleness 1, 1 server": Case("speed", 1),
        "staleness 4, 1 server": Case("speed", 4),
        "staleness 4, 4 servers": Case("speed", 4, num_servers=4),
    }
    cases = {
        name: replace(case, shard_s=shard_s, num_batches=num_batches)
        for name, case in cases.items()
        if wanted in name or case.staleness is None
    }
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            speeds[name].append(run(case)["shards_per_s"])
    base = statistics.median(speeds["synchronous, all_reduce"])
    ideal = (WORLD_SIZE - 1 + 1 / SLOWDOWN) / shard_s
    print(
        f"| {NUM_SHARDS} shards of {1e3 * shard_s:.0f} ms a batch, one worker {SLOWDOWN}x slower | shards/s | ratio |"
    )
    print("|---|---|---|")
    for name, values in speeds.items():
        print(f"| {name} | {statistics.median(values):.1f} | {statistics.median(values) / base:.2f} |")
    print(f"| sum of the workers' speeds | {ideal:.1f} | {ideal / base:.2f} |\n", flush=True)


def print_accuracies(data_dir: str, seeds: int, epochs: int) -> None:
    print(f"| LeNet on MNIST, {epochs} epochs, global batch 128 | accuracy, mean | each | slow worker's part |")
    print("|---|---|---|---|")
    for staleness in (0, 4):
        results = [
            run(Case("accuracy", staleness, num_servers=2, epochs=epochs, seed=seed), data_dir) for seed in range(seeds)
        ]
        accuracies = [100 * result["accuracy"] for result in results]
        each = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
        part = statistics.mean(result["slow_part"] for result in results)
        name = f"staleness {staleness}" + (" (synchronous)" if staleness == 0 else "")
        print(f"| {name} | {statistics.mean(accuracies):.2f} % | {each} | {part:.1%} |", flush=True)


def run(case: Case, data_dir: str = "") -> dict[str, Any]:
    """What the first of four workers finds; each has one thread, and they connect on loopback."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.rpc", "torch._dynamo"])
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=work, args=(rank, case, data_dir, f"{folder}/store", sender))
            for rank in range(WORLD_SIZE)
        ]
        for worker in workers:
            worker.start()
        try:
            if not receiver.poll(900):
                raise TimeoutError(f"{case} did not end")
            result: dict[str, Any] = receiver.recv()
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()
    return result


def work(rank: int, case: Case, data_dir: str, store: str, sender: Connection) -> None:
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
    result = speed(rank, case) if case.what == "speed" else accuracy(rank, case, data_dir)
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


def speed(rank: int, case: Case) -> dict[str, Any]:
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
    return {"shards_per_s": NUM_SHARDS * (case.num_batches - 1) / elapsed_s}


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


def accuracy(rank: int, case: Case, data_dir: str) -> dict[str, Any]:
    """Of LeNet on MNIST's test set, and how much of the work the slow worker did."""
    # Without momentum: late gradients act as momentum already (Mitliagkas et al. 2016), and both together diverge.
    optim = OptimSpec(lr=0.1, momentum=0.0, schedule="cosine", warmup_epochs=0.25)
    job = Job(epochs=case.epochs, global_batch_size=128, virtual_shards=NUM_SHARDS, seed=case.seed, optim=optim)
    train_set, test_set = data.load(DataSpec("mnist", dir=data_dir))
    assert isinstance(train_set, ArraySet)
    assert isinstance(test_set, ArraySet)
    orders = [ShuffledOrder(len(train_set), job.global_batch_size, job.seed, epoch) for epoch in range(job.epochs)]
    batches = [(epoch, order.batch(n)) for epoch, order in enumerate(orders) for n in range(order.num_batches)]
    reader = ArrayReader(train_set, torch.device("cpu"), torch.float32, False, job.seed)
    torch.manual_seed(job.seed)
    model = models.build(ModelSpec("lenet"))
    num_computed = 0

    def compute(batch: int, shard: int) -> tuple[Tensor, float]:
        nonlocal num_computed
        epoch, indices = batches[batch]
        sizes = shard_sizes(len(indices), NUM_SHARDS)
        start = sum(sizes[:shard])
        inputs, targets = next(iter([reader.read(epoch, indices[start : start + sizes[shard]], True)]))
        num_computed += 1
        for _ in range(SLOWDOWN if rank == SLOW_RANK else 1):
            model.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(inputs), targets) * sizes[shard] / len(indices)
            loss.backward()
        return loss.detach().view(1), 1.0

    schedule = UpdateSchedule(
        lambda batch: len(shard_sizes(len(batches[batch][1]), NUM_SHARDS)),
        lambda batch: lr_factor(job, sum(len(indices) for _, indices in batches[:batch]), len(train_set)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=optim.lr, momentum=optim.momentum)
    with opened(optimizer, case, schedule, case.staleness or 0) as server:
        for _ in server.work(compute, len(batches)):
            pass
    counts = torch.tensor([num_computed if rank == SLOW_RANK else 0, num_computed])
    dist.all_reduce(counts)
    model.eval()
    tests = ArrayReader(test_set, torch.device("cpu"), torch.float32, False, job.seed)
    order = torch.arange(len(test_set)).split(1000)
    correct = 0
    with torch.no_grad():
        for part in order if rank == 0 else []:
            inputs, targets = tests.read(0, part.numpy(), False)
            correct += int((model(inputs).argmax(1) == targets).sum())
    return {"accuracy": correct / len(test_set), "slow_part": counts[0].item() / counts[1].item()}


if __name__ == "__main__":
    main()
