"""What a training step asks of torch and of the host, beside a plain loop over the same virtual shards.

    python -m benchmarks.step_costs [--cases lenet resnet20 gpt] [--workers 1 2] [--shards 8] [--time]

The plain loop is `zero_grad`, then a forward and a backward pass of each shard's weighted loss, then the optimizer's
step. A row gives the torch operators of a step (those of the backward pass and the optimizer too), and with `--time`
the median wall time of a step on rank 0 in microseconds; loop and step alternate in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.kit.workers import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import paceline
from paceline.models import build


@dataclass(frozen=True)
class Case:
    """A model with random samples."""

    options: dict[str, Any]
    global_batch_size: int
    sample: tuple[int, ...]
    num_classes: int = 10

    @property
    def is_text(self) -> bool:
        return len(self.sample) == 1

    def dataset(self, num_steps: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        shape = (self.global_batch_size * num_steps, *self.sample)
        targets = torch.randint(self.num_classes, shape if self.is_text else shape[:1], generator=generator)
        inputs = targets.roll(1, 1) if self.is_text else torch.randn(shape, generator=generator)
        return TensorDataset(inputs, targets)


_IMAGES = {"num_classes": 10, "in_channels": 3, "image_size": 32}
CASES = {
    "lenet": Case({"num_classes": 10, "in_channels": 1, "image_size": 28}, 256, (1, 28, 28)),
    "resnet20": Case(_IMAGES, 128, (3, 32, 32)),
    "resnet18": Case(_IMAGES, 64, (3, 32, 32)),
    "gpt": Case({"vocab_size": 256, "context": 64}, 16, (64,), 256),
}
WARMUP_STEPS = 3


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def model_and_optimizer(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    case = CASES[name]
    model = build(name, **case.options)
    if case.is_text:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def steps_of(name: str, num_steps: int, virtual_shards: int) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
    """For each batch the plain loop and the step, both on this worker's virtual shards."""
    case = CASES[name]
    torch.manual_seed(0)
    plain, plain_optimizer = model_and_optimizer(name)
    with paceline.init(
        global_batch_size=case.global_batch_size, epochs=1, virtual_shards=virtual_shards, progress=False
    ) as run:
        model, optimizer = run.prepare(*model_and_optimizer(name))
        size = case.global_batch_size // virtual_shards
        for batch in run.batches(case.dataset(num_steps)):
            shards = list(zip(*(tensor.split(size) for tensor in batch), strict=True))

            def loop(shards: list[Any] = shards) -> None:
                plain_optimizer.zero_grad()
                for shard in shards:
                    (loss_fn(plain, shard) * (size / case.global_batch_size)).backward()
                plain_optimizer.step()

            yield loop, lambda batch=batch: run.step(batch, loss_fn)


def measure(name: str, virtual_shards: int, num_steps: int) -> tuple[Counter[str], Counter[str], float, float]:
    """The operators of a loop and of a step, and their median wall times in seconds (0 without timed steps)."""
    torch.set_num_threads(1)
    times: tuple[list[float], list[float]] = ([], [])
    counts = []
    for number, pair in enumerate(steps_of(name, WARMUP_STEPS + 1 + num_steps, virtual_shards)):
        if number == WARMUP_STEPS:
            for call in pair:
                with Operators() as operators:
                    call()
                counts.append(operators.found)
            continue
        for call, found in zip(pair, times, strict=True):
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
    medians = [statistics.median(found[WARMUP_STEPS:]) if num_steps else 0.0 for found in times]
    return counts[0], counts[1], medians[0], medians[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["lenet", "resnet20", "gpt"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--time", action="store_true", help="also time 40 steps of each")
    parser.add_argument("--operators", action="store_true", help="list the operators that a step has more")
    given = parser.parse_args()
    print("| model | workers | operators, loop | step | ratio | loop, us | step, us | ratio |\n" + "|---" * 8 + "|")
    for name in given.cases:
        for num_workers in given.workers:
            arguments = name, given.shards, 40 if given.time else 0
            loop, step, loop_s, step_s = run_ranks(measure, num_workers, *arguments, timeout_s=220)[0]
            cells = [f"{loop.total()}", f"{step.total()}", f"{step.total() / loop.total():.2f}"]
            if given.time:
                cells += [f"{loop_s * 1e6:.0f}", f"{step_s * 1e6:.0f}", f"{step_s / loop_s:.2f}"]
            else:
                cells += ["", "", ""]
            print(f"| {name} | {num_workers} | {' | '.join(cells)} |", flush=True)
            if given.operators:
                print(*(f"    {num:+d} {one}" for one, num in (step - loop).most_common()), sep="\n")
                print(*(f"    {-num:+d} {one}" for one, num in (loop - step).most_common()), sep="\n")


if __name__ == "__main__":
    main()
