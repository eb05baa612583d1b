"""Loss functions that change their batch in place: each pass gets the samples as the data set gave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks

NUM_STEPS = 6
LATE = 3
"""The step in which a loss function begins to change its batch, or to draw numbers."""


def scaled(model: nn.Module, batch: Any, _step: int) -> Tensor:
    inputs, targets = batch
    inputs.sub_(0.5).mul_(2.0)
    return F.cross_entropy(model(inputs), targets)


def scaled_late(model: nn.Module, batch: Any, step: int) -> Tensor:
    inputs, targets = batch
    if step >= LATE:
        inputs -= 0.5
        inputs *= 2.0
    return F.cross_entropy(model(inputs), targets)


def noisy(model: nn.Module, batch: Any, _step: int) -> Tensor:
    inputs, targets = batch
    inputs += 0.1 * torch.randn_like(inputs)
    return F.cross_entropy(model(inputs), targets)


def copying(model: nn.Module, batch: Any, step: int, *, of: Callable[[nn.Module, Any, int], Tensor]) -> Tensor:
    """The same loss, of a copy."""
    return of(model, [part.clone() for part in batch], step)


LOSSES = {"scaled": scaled, "scaled late": scaled_late, "noisy": noisy}


def losses_of(name: str, strategy: str, parity: str, *, copies: bool) -> list[float]:
    """In one worker: the losses of a few steps."""
    num_workers = worker_facts().world_size
    job = Job().with_values(global_batch_size=16, virtual_shards=4, epochs=2, precision="float64", parity=parity)
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(16 * NUM_STEPS // 2, 20, generator=draw, dtype=torch.float64),
        torch.randint(10, (16 * NUM_STEPS // 2,), generator=draw),
    )
    with paceline.init(job, plan=Plan(world_size=num_workers, mesh=mesh, algorithm="all_reduce", timeout_s=60)) as run:
        model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 10)).double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), example=data[:2][0])

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            if copies:
                return copying(model, batch, run.steps, of=LOSSES[name])
            return LOSSES[name](model, batch, run.steps)

        return [float(run.step(batch, loss_fn)) for batch in run.batches(data)]


def every(cases: list[tuple[str, str, str]], *, copies: bool = False) -> list[list[float]]:
    return [losses_of(*case, copies=copies) for case in cases]


def copied_by_hand(cases: list[tuple[str, str, str]]) -> list[list[float]]:
    return every([(name, "dp", "numeric") for name, *_ in cases], copies=True)


@pytest.mark.parametrize(
    ("num_workers", "strategies"), [(1, ("dp",)), (2, ("dp", "fsdp", "tp", "pp")), (4, ("dp",))], ids=str
)
def test_losses_are_those_of_a_copy(num_workers: int, strategies: tuple[str, ...]) -> None:
    cases = [
        (name, strategy, parity)
        for name in LOSSES
        for strategy in strategies
        for parity in ("numeric", "bitwise")
        if strategy == "dp" or name != "scaled late"  # refused with a sentence where its step has to start over
    ]
    expected = run_ranks(copied_by_hand, 1, cases, timeout_s=200)[0]
    for of_worker in run_ranks(every, num_workers, cases, timeout_s=200):
        for case, found, wanted in zip(cases, of_worker, expected, strict=True):
            assert len(found) == NUM_STEPS
            assert found == pytest.approx(wanted, rel=1e-12), case
