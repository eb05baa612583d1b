"""What a script computes of one worker's samples, and puts into a rate, the weights or the loss, is refused."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import DivergenceError
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

NUM_STEPS = 40
INPUTS = torch.randn(8 * NUM_STEPS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SENTENCES = {
    "rate": "The learning rates, or other numbers of the optimizer's groups, that the script has set differ",
    "weights": "weights differ between workers",
    "one worker's weights": "weights differ between workers",
    "one worker's late weights": "weights differ between workers",
    "data of weights": "weights differ between workers",
    "late data of weights": "weights differ between workers",
    "last data of weights": "weights differ between workers",
    "call for a log": "running statistics that a call of the model in training mode moves",
    "late call for a log": "running statistics that a call of the model in training mode moves",
    "variable": "The loss function reads 'scale', which the script changed before the last step",
    "attribute": "The loss function reads 'weight', which the script changed before the last step",
    "attribute in a method": "The loss function reads 'weight', which the script changed before the last step",
    "attribute in a property": "The loss function reads 'weight', which the script changed before the last step",
    "attribute of a model": "The loss function reads '1.temperature', which the script changed before the last step",
    "array": "The loss function reads 'of_samples', which the script changed before the last step",
    "dictionary": "The loss function reads 'of_classes', which the script changed before the last step",
}
STEPS_WITHOUT_A_VERSION = {"late data of weights": range(20, 40), "last data of weights": [NUM_STEPS]}


class _Settings:
    def __init__(self) -> None:
        self.weight = 1.0
        self.seconds = 0.0
        self.said_at_s = time.time()

    @property
    def _factor(self) -> float:
        return 2 * self.weight

    def _of(self, outputs: Tensor) -> Tensor:
        return self.weight * (outputs - 1).square().mean()

    def loss_by_method(self, model: nn.Module, batch: Any) -> Any:
        assert time.time() - self.said_at_s < 600
        return self._of(model(batch[0])), {"mean": batch[0].abs().mean()}

    def loss_by_property(self, model: nn.Module, batch: Any) -> Any:
        return self._factor * model(batch[0]).square().mean(), {"mean": batch[0].abs().mean()}


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.seen = self.mean = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = float(inputs.mean())  # for a log
        assert self.mean == self.mean
        return inputs / self.temperature


def _train(kind: str) -> str:
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    scale, settings = 1.0, _Settings()
    of_samples, of_classes = np.ones(8 * NUM_STEPS), {0: 1.0, 1: 1.0}

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss: Tensor = scale * settings.weight * (model(batch[0]) - 1).square().mean()
        return loss, {"mean": batch[0].abs().mean()}

    losses: dict[str, Any] = {
        "attribute in a method": settings.loss_by_method,
        "clock": settings.loss_by_method,
        "attribute in a property": lambda model, batch: settings.loss_by_property(model, batch),
        "array": lambda model, batch: (
            model(batch[0]).square().mean() * of_samples[0],
            {"mean": batch[0].abs().mean()},
        ),
        "dictionary": lambda model, batch: (model(batch[0]).mean() * of_classes[0], {"mean": batch[0].abs().mean()}),
    }

    try:
        with paceline.init(Job(global_batch_size=8, virtual_shards=4), plan=plan, progress=False) as run:
            layer = nn.Linear(4, 1)
            scaled = _Scaled()
            model: nn.Module = nn.Sequential(nn.BatchNorm1d(4), layer) if kind.endswith("log") else layer
            if "model" in kind or kind == "of all workers":
                model = nn.Sequential(layer, scaled)
            model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.batches(TensorDataset(INPUTS.float())):
                run.step(batch, losses.get(kind, loss_fn))
                own, common = float(batch[0].abs().mean()), float(run.values["mean"])
                with torch.no_grad():
                    if kind == "rate":
                        optimizer.param_groups[0]["lr"] = own
                    elif (
                        kind == "weights"
                        or (kind == "one worker's weights" and run.rank == 0)
                        or (kind == "one worker's late weights" and run.rank == 0 and run.steps == 6)
                    ):
                        layer.weight.mul_(own)
                    elif kind == "call for a log" or (kind == "late call for a log" and run.steps == 6):
                        model(batch[0])
                    elif kind == "call in evaluation mode for a log":
                        model.eval()(batch[0])
                        model.train()
                    elif kind == "lent weights" and run.rank == 0:  # as for a sample by the average of weights
                        before = layer.weight.clone()
                        layer.weight.zero_()
                        layer.weight.copy_(before)
                    elif kind == "data of weights" or (
                        kind in STEPS_WITHOUT_A_VERSION and run.steps in STEPS_WITHOUT_A_VERSION[kind]
                    ):
                        layer.weight.data *= own
                    elif kind == "variable":
                        scale = own
                    elif kind == "attribute of a model":
                        scaled.temperature = own
                    elif kind.startswith("attribute"):
                        settings.weight = own
                    elif kind == "array":
                        of_samples[run.steps] = own
                    elif kind == "dictionary":
                        of_classes[1] = own
                    elif kind == "of all workers":
                        optimizer.param_groups[0]["lr"] = scale = settings.weight = scaled.temperature = common
                        of_samples[run.steps] = of_classes[0] = common
                        scaled.seen = own  # nothing reads it
                        model.eval()(batch[0])
                        model.train()
                        layer.weight.mul_(common)
                        settings.seconds = own  # nothing reads it
                    elif kind == "clock":
                        settings.said_at_s = time.time() - run.rank
                if kind == "late data of weights":
                    assert run.steps <= 32
    except DivergenceError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("kind", SENTENCES)
def test_what_a_worker_computes_of_its_samples_is_refused(kind: str) -> None:
    for sentence in run_ranks(_train, 2, kind):
        assert SENTENCES[kind] in str(sentence)


@pytest.mark.parametrize("kind", ["of all workers", "lent weights", "clock", "call in evaluation mode for a log"])
def test_what_is_the_same_on_all_workers_is_not(kind: str) -> None:
    assert run_ranks(_train, 2, kind) == ["", ""]
