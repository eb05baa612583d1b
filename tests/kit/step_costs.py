"""A training step beside a plain loop over the same virtual shards: what each asks torch for."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
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


def stack(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def model_and_optimizer(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    case = CASES[name]
    model = build(name, **case.options)
    if case.is_text:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


Pair = tuple[Callable[[], object], Callable[[], object]]


def steps_of(name: str, num_steps: int, virtual_shards: int, batch_size: int | None = None) -> Iterator[Pair]:
    """For each global batch the plain loop and the step, both on this worker's virtual shards."""
    case = CASES[name] if batch_size is None else replace(CASES[name], global_batch_size=batch_size)
    torch.manual_seed(0)
    plain, plain_optimizer = model_and_optimizer(name)
    with paceline.init(
        global_batch_size=case.global_batch_size, epochs=1, virtual_shards=virtual_shards, progress=False
    ) as run:
        run.prepare(*model_and_optimizer(name))
        for batch in run.batches(case.dataset(num_steps), collate_fn=stack):
            shards: list[Any] = []
            batch.map(shards.append)

            def loop(shards: list[Any] = shards) -> None:
                plain_optimizer.zero_grad()
                for shard in shards:
                    (loss_fn(plain, shard) * (1 / virtual_shards)).backward()
                plain_optimizer.step()

            yield loop, functools.partial(run.step, batch, loss_fn)


def count(name: str, virtual_shards: int, batch_size: int | None = None) -> tuple[Counter[str], Counter[str]]:
    """The operators of a loop and of a step after the first ones, and before the last one, which is audited too."""
    loop, step = Operators(), Operators()
    for number, pair in enumerate(steps_of(name, WARMUP_STEPS + 2, virtual_shards, batch_size)):
        for call, operators in zip(pair, (loop, step), strict=True):
            with operators if number == WARMUP_STEPS else nullcontext():
                call()
    return loop.found, step.found
