"""What optimizers keep outside of their `state_dict` goes on in a resumed run, on another number of workers too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
SET = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True).sin())
STOP = 3


class SAM(torch.optim.Optimizer):
    """As it is published: another optimizer, which has the momentum, makes the updates."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=float(0.05 / norm))
        closure()
        for p in parameters:
            p.copy_(self.state[p]["before"])
        self.base.step()


class SlowWeights(torch.optim.Optimizer):
    """Lookahead as it is published: slow weights are its own state, and its `state_dict` has a form of its own."""

    def __init__(self, parameters: Any) -> None:
        self.fast = torch.optim.Adam(parameters, lr=0.1)
        super().__init__(self.fast.param_groups, {})
        self.param_groups = self.fast.param_groups
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fast.step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if group["counter"] == 0:
                    p.copy_(slow.lerp_(p, 0.5))
            group["counter"] = (group["counter"] + 1) % 2

    def state_dict(self) -> dict[str, Any]:
        fast = self.fast.state_dict()
        slow = {id(p): state for p, state in self.state.items()}
        return {"fast_state": fast["state"], "slow_state": slow, "param_groups": fast["param_groups"]}


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _train(by: Any, folder: str, max_steps: int | None = None) -> tuple[list[float], str]:
    job = Job().with_values(global_batch_size=8, virtual_shards=4, epochs=1, parity="bitwise")
    plan = Plan(world_size=worker_facts().world_size, algorithm="tree_exact", timeout_s=60)
    with paceline.init(job, plan=plan, checkpoint_dir=f"{folder}/{by.__name__}", max_steps=max_steps) as run:
        model = nn.Linear(4, 1)
        optimizer = by(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        run.prepare(model, optimizer, scheduler=scheduler)
        return [float(run.step(batch, _loss)) for batch in run.batches(SET)], run.weights_sha256()


def test_wrapped_optimizers_go_on(tmp_path: Path) -> None:
    for by in (SAM, SlowWeights):
        ((losses, sha),) = run_ranks(_train, 1, by, str(tmp_path / "whole"))
        run_ranks(_train, 2, by, str(tmp_path / "parts"), STOP)
        for found in run_ranks(_train, 3, by, str(tmp_path / "parts")):
            assert found == (losses[STOP:], sha), by
