"""What the planner forecasts that a worker holds, beside what it does hold, model by model.

    python -m benchmarks.memory_forecasts [--models lenet,resnet18] [--samples 8]

Each model trains for two steps on one CPU worker. Counted are its parameters, its gradients, what the optimizer keeps,
and at the end of the second forward pass the memory that autograd keeps, each piece once. The forecast comes from a
trace on the meta device with two samples, by the formulas that choose meshes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models import build
from paceline.parallel.dry_run import on_paper, trace_model
from paceline.parallel.pipeline.layer_costs import counting_kept
from paceline.plan.memory import device_memory, state_bytes
from paceline.spec import Job, Mesh, ModelSpec

TRACED_SAMPLES = 2


@dataclass(frozen=True)
class Case:
    """A model and one sample's shape; of one number: that many tokens."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (3, 32, 32)


_IMAGES = {"num_classes": 10, "in_channels": 3}
CASES = {
    "lenet": Case("lenet", {**_IMAGES, "image_size": 32}),
    "mlp": Case("mlp", {**_IMAGES, "image_size": 32}),
    "resnet20": Case("resnet20", _IMAGES),
    "resnet18": Case("resnet18", {**_IMAGES, "stem": "cifar"}),
    "efficientnet-b0": Case("efficientnet-b0", _IMAGES),
    "gpt": Case("gpt", {"vocab_size": 256, "context": 64, "num_layers": 4, "num_heads": 4, "width": 128}, (64,)),
}


def sample(case: Case, num_samples: int) -> Tensor:
    if len(case.shape) == 1:
        return torch.randint(0, case.options["vocab_size"], (num_samples, *case.shape))
    return torch.randn(num_samples, *case.shape)


def num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def measured(case: Case, job: Job, num_samples: int) -> tuple[int, int]:
    """Bytes of state, and of activations, of a worker with the whole model."""
    model: nn.Module = build(ModelSpec(case.model, case.options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    kept = 0
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        with counting_kept([*model.parameters(), *model.buffers()]) as kept_bytes:
            logits = model(sample(case, num_samples))
            logits = logits.flatten(0, -2)
            loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
            kept = kept_bytes()
        loss.backward()
        optimizer.step()
    state = [value for held in optimizer.state.values() for value in held.values()]
    grads = [parameter.grad for parameter in model.parameters()]
    assert job.optim.name == "sgd"
    return num_bytes(model.parameters()) + num_bytes(grads) + num_bytes(state), kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--samples", type=int, default=8)
    asked = parser.parse_args()
    job = Job()
    print(
        "| model | state, MB: forecast / measured | activations, MB: forecast / measured | all: forecast / measured |"
    )
    print("|---|---|---|---|")
    for name in asked.models.split(","):
        case = CASES[name]
        spec = ModelSpec(case.model, case.options)
        model, arguments = on_paper(partial(build, spec), sample(case, 1)[0], TRACED_SAMPLES)
        cost = trace_model(model, arguments, TRACED_SAMPLES)
        memory = device_memory(cost.num_parameters, state_bytes(job), Mesh(), cost.activations, asked.samples)
        state, kept = measured(case, job, asked.samples)
        print(
            f"| {name} | {memory.state_bytes / 1e6:.2f} / {state / 1e6:.2f} "
            f"| {memory.activation_bytes / 1e6:.2f} / {kept / 1e6:.2f} | {memory.total_bytes / (state + kept):.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
