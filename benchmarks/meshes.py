"""The law of the world size, model by model and mesh by mesh: how far losses and gradients are from one worker's.

    python -m benchmarks.meshes [--models lenet,gpt] [--strategies "pp,fsdp2 x tp2"] [--precisions float64] [--steps 10]

Every model is trained on one worker, and on four by every strategy and every mesh of two axes. Printed is the largest
relative difference of a loss, and of a gradient as a whole, over all steps, and the median of the gradient's. What is
asked: 1e-6 in float32, 1e-10 in float64. The first line of a model, `one bit`, is what nobody can go below: the
worst of some runs of one worker, in each of which one weight differs in its last bit. Where that bit decides on which
side of 0 a ReLU is, the gradient of that step jumps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.kit.workers import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WORKERS = 4
STRATEGIES = (
    "fsdp",
    "zero1",
    "zero2",
    "hsdp",
    "pp",
    "tp",
    "dp2 x pp2",
    "dp2 x tp2",
    "fsdp2 x pp2",
    "fsdp2 x tp2",
    "tp2 x pp2",
)
SAMPLES, BATCH, SHARDS = 44, 22, 6
LR = 0.002
"""So small that ten steps do not turn rounding into something else. Images have 16 pixels for the same reason: with 8,
batch norm at the end of a ResNet sees three values a channel, and a difference grows a hundredfold in every step,
between one worker and two plain replicas as well."""

NUM_BITS = 5
"""Runs of one worker with one bit changed: in the first parameter, the second …"""


@dataclass(frozen=True)
class Case:
    """A model and the shape of what it learns from."""

    model: str
    options: dict[str, Any]
    shape: tuple[int, ...]
    """Of an image; of one number: that many tokens."""


CASES = {
    "lenet": Case("lenet", {"num_classes": 10, "in_channels": 3, "image_size": 16}, (3, 16, 16)),
    # Blocks that start as their shortcuts: otherwise ResNet-50's first gradient has a length of 278 and not of 7, and
    # after six steps one bit is half of a gradient.
    "resnet18": Case(
        "resnet18", {"num_classes": 10, "in_channels": 3, "stem": "cifar", "zero_init_residual": True}, (3, 16, 16)
    ),
    "resnet50": Case(
        "resnet50", {"num_classes": 10, "in_channels": 3, "stem": "cifar", "zero_init_residual": True}, (3, 16, 16)
    ),
    "gpt": Case(
        "gpt", {"vocab_size": 31, "context": 12, "num_layers": 4, "num_heads": 4, "width": 32, "dropout": 0.1}, (12,)
    ),
    # With an embedding that tensor groups divide, and the classifier with it.
    "gpt-words": Case(
        "gpt", {"vocab_size": 1031, "context": 12, "num_layers": 4, "num_heads": 4, "width": 64, "dropout": 0.1}, (12,)
    ),
}


@dataclass(frozen=True)
class Trace:
    """What a run computed, step by step."""

    losses: list[float]
    gradients: list[Tensor]
    """Of the whole model, one vector a step."""


def samples(case: Case) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    if len(case.shape) == 1:
        tokens = torch.randint(0, case.options["vocab_size"], (SAMPLES, case.shape[0] + 1), generator=draw)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])
    images = torch.randn(SAMPLES, *case.shape, generator=draw)
    return TensorDataset(images, torch.randint(0, 10, (SAMPLES,), generator=draw))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def train(model_name: str, strategy: str, precision: str, num_steps: int, changed: int | None = None) -> Trace:
    """With the first weight of parameter number `changed` replaced by the next larger number."""
    import paceline
    from paceline import models
    from paceline.env import worker_facts
    from paceline.spec import Job, Mesh, ModelSpec, Plan, parse_mesh

    case = CASES[model_name]
    num_workers = worker_facts().world_size
    mesh = Mesh() if num_workers == 1 else parse_mesh(strategy, num_workers)
    job = Job().with_values(
        global_batch_size=BATCH, virtual_shards=SHARDS, epochs=num_steps, precision=precision, measure_noise=False
    )
    plan = Plan(world_size=num_workers, mesh=mesh, algorithm="all_reduce", timeout_s=120)
    data = samples(case)
    losses, gradients = [], []
    with paceline.init(job, plan=plan, max_steps=num_steps) as run:
        model = models.build(ModelSpec(case.model, case.options))
        if changed is not None:
            model = model.to(getattr(torch, precision))
            first = list(model.parameters())[changed].detach().view(-1)[:1]
            first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))
        example = data[:2][0].double() if precision == "float64" and len(case.shape) > 1 else data[:2][0]
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR), example=example)
        for batch in run.batches(data):
            losses.append(float(run.step(batch, loss_fn)))
            grads = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
            whole = run.engine.whole(grads)
            gradients.append(
                torch.cat([whole[name].detach().reshape(-1).clone() for name in sorted(whole)] or [torch.empty(0)])
            )
    return Trace(losses, gradients)


def run(num_workers: int, *arguments: Any) -> Trace:
    """What rank 0 of so many workers traced."""
    traces: list[Trace] = run_ranks(train, num_workers, *arguments, timeout_s=600.0)
    return traces[0]


def row(model: str, name: str, precision: str, alone: Trace, others: list[Trace], seconds: float) -> str:
    """How far the others are from one worker."""
    losses = [abs(a - b) / abs(a) for other in others for a, b in zip(alone.losses, other.losses, strict=True)]
    gradients = [
        float((a - b).norm() / a.norm())
        for other in others
        for a, b in zip(alone.gradients, other.gradients, strict=True)
    ]
    middle = statistics.median(gradients)
    return f"{model:20} {name:12} {precision:9} {max(losses):9.1e} {max(gradients):9.1e} {middle:9.1e} {seconds:7.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--precisions", default="float64,float32")
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    print(f"{'model':20} {'strategy':12} {'precision':9} {'loss':>9} {'gradient':>9} {'median':>9} {'seconds':>7}")
    for precision in asked.precisions.split(","):
        for model in asked.models.split(","):
            begun = time.monotonic()
            alone = run(1, model, "dp", precision, asked.steps)
            changed = [run(1, model, "dp", precision, asked.steps, number) for number in range(NUM_BITS)]
            print(row(model, "one bit", precision, alone, changed, time.monotonic() - begun), flush=True)
            for strategy in map(str.strip, asked.strategies.split(",")):
                begun = time.monotonic()
                try:
                    spread = run(WORKERS, model, strategy, precision, asked.steps)
                except (AssertionError, TimeoutError) as problem:
                    print(f"{model:20} {strategy:12} {precision:9} failed: {problem}", flush=True)
                    continue
                print(row(model, strategy, precision, alone, [spread], time.monotonic() - begun), flush=True)


if __name__ == "__main__":
    main()
