"""The operations that a training step asks torch for, counted; on a GPU each one that is no view launches kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline import models
from paceline.env import worker_facts
from paceline.spec import Job, ModelSpec, Plan
from tests.kit.sim_gpu.observing import line_of_project

_VIEWS_BY_ANOTHER_NAME = ("aten._unsafe_view.default", "aten.lift_fresh.default")


class Operations(TorchDispatchMode):
    """`with Operations() as seen:` counts what this thread asks for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[str, str]] = Counter()
        """By the innermost line of the project and the name of the operation."""
        self.num_views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[line_of_project(), str(func)] += 1
        self.num_views += _is_view(func)
        return func(*args, **(kwargs or {}))

    @property
    def num_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def num_kernels(self) -> int:
        """Without views."""
        return self.num_calls - self.num_views

    def table(self, num_rows: int = 40) -> str:
        """The most frequent ones."""
        rows = [f"{number:6d} {where:50s} {name}" for (where, name), number in self.calls.most_common(num_rows)]
        return "\n".join(rows)


def _is_view(func: Any) -> bool:
    aliases = [one.alias_info for one in func._schema.returns]
    return str(func) in _VIEWS_BY_ANOTHER_NAME or any(one is not None and not one.is_write for one in aliases)


@dataclass(frozen=True)
class Case:
    """A model and the samples it is trained on."""

    model: ModelSpec
    facts: dict[str, Any]
    sample: tuple[int, ...]
    """Shape of an image; of a text its length."""
    global_batch_size: int = 32

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return models.build(self.model, **self.facts)

    def samples(self, num_samples: int) -> list[tuple[Tensor, Tensor]]:
        draw = np.random.default_rng(0)
        if len(self.sample) == 1:
            tokens = torch.from_numpy(draw.integers(0, self.facts["vocab_size"], (num_samples, self.sample[0] + 1)))
            return [(row[:-1].contiguous(), row[1:].contiguous()) for row in tokens]
        pixels = torch.from_numpy(draw.standard_normal((num_samples, *self.sample), dtype=np.float32))
        return list(zip(pixels, torch.from_numpy(draw.integers(0, 10, num_samples)), strict=True))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # Fused as on GPUs, where an operation for each parameter would hide what else a step does.
        if len(self.sample) == 1:
            return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def _image_case(name: str, size: int, channels: int = 3, batch: int = 32, **options: Any) -> Case:
    facts = {"num_classes": 10, "in_channels": channels, "image_size": size}
    return Case(ModelSpec(name, options), facts, (channels, size, size), batch)


CASES = {
    "lenet": _image_case("lenet", 28, 1, 256),
    "resnet20": _image_case("resnet20", 32),
    "resnet18": _image_case("resnet18", 32, batch=64),
    "efficientnet-b0": _image_case("efficientnet-b0", 32, dropout=0.0, stochastic_depth=0.0),
    "efficientnet-b0, dropout": _image_case("efficientnet-b0", 32),
    "gpt": Case(ModelSpec("gpt", {"num_layers": 2, "width": 64}), {"vocab_size": 64, "context": 32}, (32,)),
}


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    outputs = model(inputs)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def plain_step(case: Case, device: str = "cpu") -> Callable[[], object]:
    """A step as a plain training loop makes it."""
    model, samples = case.build().to(device), case.samples(case.global_batch_size)
    optimizer = case.optimizer(model)
    batch = [torch.stack(column).to(device) for column in zip(*samples, strict=True)]

    def step() -> object:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def plain_backward(case: Case) -> Callable[[], object]:
    """The backward pass alone of a plain training loop."""
    model, samples = case.build(), case.samples(case.global_batch_size)
    loss = loss_fn(model, [torch.stack(column) for column in zip(*samples, strict=True)])
    return loss.backward


def our_steps(
    case: Case, parity: str = "numeric", num_steps: int = 6, device_kind: Any = "cpu", **values: Any
) -> Iterator[Callable[[], object]]:
    """The steps of an epoch on whatever workers run this, each to be made before the next is asked for."""
    job = Job.from_mapping(
        {"global_batch_size": case.global_batch_size, "virtual_shards": 8, "parity": parity} | values
    )
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    plan = Plan(worker_facts().world_size, device_kind=device_kind, algorithm=algorithm, timeout_s=120)
    with paceline.init(job, plan=plan) as run:
        model = case.build()
        model, _ = run.prepare(model, case.optimizer(model))
        for batch in run.batches(case.samples(case.global_batch_size * num_steps)):
            yield lambda batch=batch: run.step(batch, loss_fn)  # type: ignore[misc]


def count(steps: Iterable[Callable[[], object]]) -> Operations:
    """The operations of the last of these steps."""
    for step in steps:
        seen = Operations()
        with seen:
            step()
    return seen
