"""Parameters of a criterion that a script trains itself are refused: their gradient is of one worker's samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import ModelError
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))
KINDS = ("in a criterion", "alone", "without an update", "a teacher", "of another model")


class _Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * self.scale - targets).square().mean()


class _WithItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.criterion = nn.Linear(4, 1), _Scaled()

    def forward(self, inputs: Tensor) -> Any:
        return self.body(inputs)


def _train(kind: str, parity: str) -> str:
    """What is refused, or the weights at the end."""
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    job = Job(global_batch_size=8, virtual_shards=4, parity=parity)  # type: ignore[arg-type]
    criterion: Any = _Scaled()
    scale = nn.Parameter(torch.ones(1))

    def with_criterion(model: nn.Module, batch: Any) -> Any:
        if kind == "a teacher":
            with torch.no_grad():
                targets = criterion.scale * batch[1]
            return (model(batch[0]) - targets).square().mean()
        return criterion(model(batch[0]), batch[1])

    def of_criterion(model: nn.Module, batch: Any) -> Any:
        return model(batch[0].sum(1, keepdim=True), batch[1])

    def alone(model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) * scale - batch[1]).square().mean()

    with paceline.init(job, plan=plan, max_steps=3, progress=False) as run:
        if kind == "part of the model":
            model: nn.Module = _WithItsLoss()
            criterion = model.criterion
        else:
            model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if kind == "of another model":
            run.prepare(criterion, torch.optim.SGD(criterion.parameters(), lr=0.1), name="criterion")
        optimizer = torch.optim.SGD([scale] if kind == "alone" else criterion.parameters(), lr=0.1)
        try:
            for batch in run.batches(DATA):
                run.step(batch, alone if kind == "alone" else with_criterion, model=model)
                if kind == "of another model":
                    run.step(
                        batch, lambda model, batch: model(batch[0].sum(1, keepdim=True), batch[1]), model=criterion
                    )
                elif kind == "a teacher":
                    with torch.no_grad():
                        criterion.scale.mul_(0.9)
                elif kind in ("in a criterion", "alone"):
                    optimizer.step()
        except ModelError as refusal:
            return str(refusal)
        return run.weights_sha256()


@pytest.mark.parametrize("parity", ["numeric", "bitwise"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_the_script_trains_itself_is_refused(world_size: int, parity: str) -> None:
    for kind, name in (("in a criterion", "scale"), ("alone", "scale")):
        for said in run_ranks(_train, world_size, kind, parity):
            assert f"The script itself trains the parameter '{name}', of shape (1,)" in said


def test_others_are_not() -> None:
    for kind in KINDS[2:]:
        assert all(len(said) == 64 for said in run_ranks(_train, 2, kind, "numeric"))


def test_as_a_part_of_the_model_it_is_trained_alike_on_any_number_of_workers() -> None:
    (alone,) = run_ranks(_train, 1, "part of the model", "bitwise")
    assert len(alone) == 64
    assert run_ranks(_train, 2, "part of the model", "bitwise") == [alone, alone]
