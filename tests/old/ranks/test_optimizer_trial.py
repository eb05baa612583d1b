"""Optimizers from elsewhere on parts of a model: the updates of one worker, or a sentence before training begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.dtensor_type import local_shard
from paceline.env import worker_facts
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks


class _Own(torch.optim.SGD):
    """Scales gradients before it goes down along them."""

    def __init__(self, parameters: Iterable[Tensor], most: float = 0.1) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.most = most  # which a copy by torch's own rules would lack

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.scale([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
        super().step()

    def scale(self, gradients: list[Tensor]) -> None:
        raise NotImplementedError


class MakesStateAtOnce(torch.optim.Adagrad):
    """Its sums of squares are there before `run.prepare` divides the parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, lr=0.1, initial_accumulator_value=0.5)


class ClipsAll(_Own):
    def scale(self, gradients: list[Tensor]) -> None:
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.mul_((self.most / norm).clamp(max=1.0))


class NormalisesEach(_Own):
    def scale(self, gradients: list[Tensor]) -> None:
        for gradient in gradients:
            gradient.mul_(self.most / (gradient.norm() + 1e-3))


class NormalisesShards(_Own):
    def scale(self, gradients: list[Tensor]) -> None:
        for gradient in gradients:
            gradient.mul_(self.most / (local_shard(gradient).norm() + 1e-3))


class HasModes(NormalisesEach):
    """As schedule-free optimizers, which keep other weights for an evaluation."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        assert self.is_training, "not in train mode when step is called"
        super().step()


class ClipsBeforeItsClosure(torch.optim.SGD):
    """As users write it: none of torch's own, so that it gets a closure under dp."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


def clips_in_hook(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    held = list(parameters)
    optimizer = torch.optim.SGD(held, lr=0.1)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer


class CannotBeCopied(NormalisesEach):
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.open = (number for number in range(3))


def _learn(by: Any, strategy: str) -> dict[str, Any]:
    num_workers = worker_facts().world_size
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    job = Job().with_values(global_batch_size=12, virtual_shards=6, precision="float64")
    plan = Plan(world_size=num_workers, mesh=mesh, algorithm="all_reduce", timeout_s=60)
    draws = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(48, 8, generator=draws), torch.randint(0, 4, (48,), generator=draws))
    with paceline.init(job, plan=plan) as run:
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = by(model.parameters())
        # A scheduler puts a `step` into the optimizer, and begins with a rate of zero.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
        run.prepare(model, optimizer, scheduler=scheduler, example=torch.randn(2, 8).double())
        if isinstance(optimizer, HasModes):
            optimizer.train()
        drawn = torch.rand(3).numpy()
        for batch in run.batches(samples):
            run.step(batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
        return {name: value.detach().numpy().copy() for name, value in run.whole_state().items()} | {"drawn": drawn}


def _assert_learns_the_same(by: Any, strategy: str, num_workers: int = 2) -> None:
    (alone,) = run_ranks(_learn, 1, by, "dp")
    spread = run_ranks(_learn, num_workers, by, strategy)[0]
    for name, value in alone.items():
        np.testing.assert_allclose(spread[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("by", "strategy", "num_workers"),
    [
        (ClipsAll, "dp", 2),
        (ClipsAll, "fsdp", 2),
        (NormalisesEach, "pp", 3),
        (NormalisesEach, "fsdp", 3),
        (NormalisesEach, "tp", 2),
        (HasModes, "fsdp", 2),
        (MakesStateAtOnce, "fsdp", 2),
        (MakesStateAtOnce, "pp", 2),
    ],
)
def test_what_can_update_parts_learns_the_same(by: Any, strategy: str, num_workers: int) -> None:
    _assert_learns_the_same(by, strategy, num_workers)


@pytest.mark.parametrize(
    ("by", "strategy", "why"),
    [
        (ClipsAll, "pp", "the update of '0.weight' depends on what other workers hold"),
        (NormalisesShards, "fsdp", "the update of '0.weight' depends on what other workers hold"),
        (NormalisesShards, "zero1", "the update of '0.weight' depends on what other workers hold"),
        (NormalisesShards, "tp", "the update of '.*' depends on what other workers hold"),
        (CannotBeCopied, "pp", "a trial on small parameters ended in TypeError"),
    ],
)
def test_what_cannot_is_refused_before_training(by: Any, strategy: str, why: str) -> None:
    with pytest.raises(
        AssertionError, match=rf"ModelError: {by.__name__} cannot update a model under .*: {why}.* dp\."
    ):
        run_ranks(_learn, 2, by, strategy)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_gradients_that_a_step_has_clipped_stay_so_when_it_calls_its_closure(num_workers: int) -> None:
    (hooked,) = run_ranks(_learn, 1, clips_in_hook, "dp")
    for clipped in run_ranks(_learn, num_workers, ClipsBeforeItsClosure, "dp")[:1]:
        for name, value in hooked.items():
            np.testing.assert_allclose(clipped[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_hooks_of_an_optimizer_see_all_gradients_or_are_refused() -> None:
    _assert_learns_the_same(clips_in_hook, "fsdp")
    with pytest.raises(AssertionError, match=r"ModelError: A hook of the optimizer .* one stage of the pipeline only"):
        run_ranks(_learn, 2, clips_in_hook, "pp")
