"""A run that was broken off goes on as if it had not been: with all that it and its script had, from the same data and
job only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import PacelineError
from tests.kit.workers import run_ranks

NUM_SAMPLES, BATCH, EPOCHS = 24, 8, 3  # three steps an epoch


def _rows(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(num_samples, 3, generator=draw), torch.randn(num_samples, 1, generator=draw))


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    loss: Tensor = (model(inputs) - targets).square().mean()
    return loss


class _Layers(nn.Sequential):
    """Two layers, and a mean of the inputs that a state_dict leaves out."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Linear(4, 1))
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self[1](self[0](inputs - self.mean))
        if self.training:
            self.mean += 0.1 * (inputs.mean(0) - self.mean)
        return output


class _CountingSGD(torch.optim.SGD):
    """Halves its rate after four steps, which it counts in an attribute."""

    num_steps = 0

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 if self.num_steps <= 4 else 0.05
        return super().step(closure)


Script = Callable[[paceline.Run, nn.Module, torch.optim.Optimizer], tuple[Callable[[int], None], Callable[[], Any]]]
"""After `run.prepare`: what the script does after each step, and what it has at the end besides weights."""


def _an_average_of_the_weights(run: paceline.Run, _model: nn.Module, _optimizer: Any) -> Any:
    average = run.average(0.5)
    return lambda _step: None, lambda: [one.tolist() for one in average.module.state_dict().values()]


def _a_generator(run: paceline.Run, model: nn.Module, _optimizer: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    run.keep("generator", generator)
    drawn: list[float] = []

    def draw(_step: int) -> None:
        drawn.append(float(torch.rand((), generator=generator)))

    return draw, lambda: drawn[-1]


def _parameters_that_are_unfrozen(_run: paceline.Run, model: nn.Module, _optimizer: Any) -> Any:
    first = next(model.parameters())
    if _run.steps == 0:
        first.requires_grad_(False)

    def unfreeze(step: int) -> None:
        if step == 4:
            first.requires_grad_(True)

    return unfreeze, lambda: first.requires_grad


def _a_scheduler(run: paceline.Run, _model: nn.Module, optimizer: Any) -> Any:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run.keep("scheduler", scheduler)
    return lambda _step: scheduler.step(), lambda: optimizer.param_groups[0]["lr"]


def _a_teacher_that_moves(run: paceline.Run, model: nn.Module, _optimizer: Any) -> Any:
    torch.manual_seed(5)
    teacher = run.prepare(nn.Linear(3, 4), name="teacher")

    def move(_step: int) -> None:
        teacher.weight.lerp_(next(model.parameters()).detach(), 0.5)

    return move, lambda: teacher.weight.tolist()


def _nothing(_run: paceline.Run, _model: nn.Module, _optimizer: Any) -> Any:
    return lambda _step: None, lambda: None


STATES: dict[str, tuple[Script, Callable[..., torch.optim.Optimizer]]] = {
    "an average of the weights": (_an_average_of_the_weights, torch.optim.SGD),
    "a generator": (_a_generator, torch.optim.SGD),
    "parameters that are unfrozen": (_parameters_that_are_unfrozen, torch.optim.SGD),
    "a scheduler": (_a_scheduler, torch.optim.SGD),
    "a teacher that moves": (_a_teacher_that_moves, torch.optim.SGD),
    "the optimizer's own numbers": (_nothing, _CountingSGD),
    "moments": (_nothing, torch.optim.AdamW),
}


def _train(
    folder: str,
    script: Script = _nothing,
    optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    *,
    data: TensorDataset | None = None,
    sampler: Any = None,
    max_steps: int | None = None,
    asks_total: bool = False,
    **job: Any,
) -> Any:
    values = {"global_batch_size": BATCH, "virtual_shards": 2, "epochs": EPOCHS} | job
    with paceline.init(checkpoint_dir=folder, max_steps=max_steps, progress=False, **values) as run:
        layers = _Layers()
        model, optimizer = run.prepare(layers, optimizer_of(layers.parameters(), lr=0.1))
        after_step, at_end = script(run, model, optimizer)
        if asks_total:
            run.total_steps(NUM_SAMPLES)
        seen = []
        for batch in run.batches(data or _rows(), sampler=sampler):
            seen.append(batch[0].tolist())
            run.step(batch, _loss)
            after_step(run.steps)
        return seen, run.weights_sha256(), model.mean.tolist(), at_end()


def _whole_and_in_two(state: str, folder: str) -> tuple[Any, Any]:
    script, optimizer_of = STATES[state]
    seen, *whole = _train(f"{folder}/whole", script, optimizer_of)
    # In the middle of the second epoch.
    before, *_ = _train(f"{folder}/two", script, optimizer_of, max_steps=5)
    after, *in_two = _train(f"{folder}/two", script, optimizer_of)
    return (seen, *whole), (before + after, *in_two)


@pytest.mark.parametrize("state", STATES)
def test_a_run_in_two_parts_is_the_run_in_one(state: str, tmp_path: Path) -> None:
    ((whole, in_two),) = run_ranks(_whole_and_in_two, 1, state, str(tmp_path))
    assert in_two == whole


_COSINE = {"optim": {"schedule": "cosine"}}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "data of another size": ({}, {"data": _rows(32)}, ("24", "32")),
    "another order": (
        {"sampler": lambda _seed, _epoch: range(NUM_SAMPLES)},
        {"sampler": lambda _seed, _epoch: range(NUM_SAMPLES - 1, -1, -1)},
        ("order",),
    ),
    "another seed": ({}, {"seed": 1}, ("seed", "force")),
    "another length of a script's schedule": ({"asks_total": True}, {"asks_total": True}, ("total_steps", "9")),
    "more epochs of a schedule that ends with them": (_COSINE, _COSINE | {"epochs": 5}, ("epochs", "5")),
}
"""What the first part of a run has, what the second has, and words of the refusal."""


def _second_part(other: str, folder: str) -> str:
    first, second, _ = OTHERS[other]
    _train(folder, max_steps=4, **first)
    try:
        _train(folder, **second)
    except PacelineError as refusal:
        return str(refusal)
    return "it went on"


@pytest.mark.parametrize("other", OTHERS)
def test_another_run_does_not_go_on_from_a_checkpoint(other: str, tmp_path: Path) -> None:
    (said,) = run_ranks(_second_part, 1, other, str(tmp_path))
    assert all(word in said for word in OTHERS[other][2]), said
