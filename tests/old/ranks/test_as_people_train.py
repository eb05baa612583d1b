"""What scripts do between and inside of steps: freezing and unfreezing, closures, activation checkpointing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan
from tests.kit.workers import in_turn, run_ranks

STEPS = 6
DRAW = torch.Generator().manual_seed(3)
SAMPLES = [(torch.randn(12, generator=DRAW), torch.randn(3, generator=DRAW)) for _ in range(72)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(0.2)

    def _block(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.second(inputs).tanh())
        return out

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self._block, self.first(inputs).relu(), use_reentrant=False)
        out: Tensor = self.head(hidden)
        return out


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    loss: Tensor = (model(inputs) - targets.to(inputs.dtype)).square().mean()
    return loss


def _train(case: str, parity: str, mesh: str | None) -> tuple[list[float], dict[str, np.ndarray[Any, Any]], str]:
    facts = worker_facts()
    precision = "float32" if parity == "bitwise" else "float64"
    values: dict[str, Any] = {"parity": parity, "precision": precision}
    job = Job.from_mapping({"global_batch_size": 12, "virtual_shards": 6, "epochs": 1, **values})
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    plan = Plan(world_size=facts.world_size, algorithm=algorithm, timeout_s=120)
    spread: dict[str, Any] = {"plan": plan} if mesh is None else {"strategy": mesh}
    with paceline.init(job, max_steps=STEPS, **spread) as run:
        model: nn.Module = Net()
        if case == "closure":
            optimizer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if case == "freezing":
            model.first.requires_grad_(False)
        model, _ = run.prepare(model, optimizer)
        data = [(inputs.double(), targets) for inputs, targets in SAMPLES] if precision == "float64" else SAMPLES
        losses = []
        for batch in run.batches(data):
            if case == "freezing" and run.steps == 2:
                run.model.first.requires_grad_(True)
            if case == "freezing" and run.steps == 4:
                run.model.second.requires_grad_(False)
            losses.append(float(run.step(batch, _loss)))
        weights = {name: tensor.detach().cpu().numpy().copy() for name, tensor in run.whole_state().items()}
        return losses, weights, run.weights_sha256()


def _all(cases: list[tuple[str, str, str | None]]) -> list[Any]:
    return in_turn(_train, cases)


@pytest.mark.timeout(300)
def test_freezing_and_closures_keep_the_law() -> None:
    cases: list[tuple[str, str, str | None]] = [
        (case, parity, None) for case in ("plain", "freezing", "closure") for parity in ("bitwise", "numeric")
    ]
    (alone,) = run_ranks(_all, 1, cases, timeout_s=200)
    for (case, _, _), (losses, weights, _) in zip(cases, alone, strict=True):
        assert len(losses) == STEPS and losses[-1] != losses[0]
        if case == "closure":
            assert all(np.isfinite(value).all() for value in weights.values())
    for world_size in (2, 3):
        for of_worker in run_ranks(_all, world_size, cases, timeout_s=200):
            for (_, parity, _), expected, found in zip(cases, alone, of_worker, strict=True):
                if parity == "bitwise":
                    assert (found[0], found[2]) == (expected[0], expected[2])
                np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
                for name, value in found[1].items():
                    np.testing.assert_allclose(value, expected[1][name], rtol=1e-9, atol=1e-12)


def _closure_on_a_mesh() -> None:
    _train("closure", "numeric", "fsdp")


@pytest.mark.timeout(200)
def test_freezing_under_fsdp_and_what_closures_cannot_have() -> None:
    cases: list[tuple[str, str, str | None]] = [("freezing", "numeric", None)]
    (alone,) = run_ranks(_all, 1, cases, timeout_s=100)
    sharded = run_ranks(_all, 2, [("freezing", "numeric", "fsdp")], timeout_s=150)
    np.testing.assert_allclose(sharded[0][0][0], alone[0][0], rtol=1e-12)
    with pytest.raises(AssertionError, match="JobError: LBFGS computes the gradient several times"):
        run_ranks(_closure_on_a_mesh, 2, timeout_s=100)
