"""A teacher that the script moves, with batch norm in training mode; losses that need two samples."""

from __future__ import annotations

import copy
import io
import itertools
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = TensorDataset(INPUTS)


def _distil(parity: str) -> tuple[float, float, str]:
    """The loss of the last step, and the teacher's error at the end, and what the run says."""
    torch.set_default_dtype(torch.float64)
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    job = Job(global_batch_size=16, virtual_shards=4, epochs=1, parity=parity)  # type: ignore[arg-type]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return F.mse_loss(model(batch[0] + 0.1), wanted)

    def error(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"error": model(batch[0]).square().mean(1)}

    said = io.StringIO()
    with redirect_stderr(said), paceline.init(job, plan=plan, progress=False) as run:
        student = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        teacher = copy.deepcopy(student).requires_grad_(False)
        run.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1))
        for batch in run.batches(DATA):
            loss = run.step(batch, loss_fn)
        return float(loss), run.evaluate(DATA, error, model=teacher)["error"], said.getvalue()


@pytest.mark.parametrize("parity", ["numeric", "bitwise"])
def test_a_teacher_in_training_mode_is_the_same_on_any_number_of_workers(parity: str) -> None:
    ((*alone, said),) = run_ranks(_distil, 1, parity)
    assert said.count("belong to no model given to run.prepare") == 1
    for *found, _ in run_ranks(_distil, 2, parity):
        assert found == pytest.approx(alone, abs=0 if parity == "bitwise" else 1e-12)


def _nearest(model: nn.Module, batch: Any) -> Tensor:
    """The distance of each sample to the nearest other one, of which there has to be one."""
    outputs = model(batch[0])
    others = [torch.cdist(one[None], outputs[torch.arange(len(outputs)) != i]).amin() for i, one in enumerate(outputs)]
    return torch.stack(others).mean()


def _compare(parity: str) -> list[float]:
    torch.set_default_dtype(torch.float64)
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    job = Job(global_batch_size=16, virtual_shards=4, epochs=1, parity=parity)  # type: ignore[arg-type]
    with paceline.init(job, plan=plan, progress=False) as run:
        model = nn.Linear(4, 2)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return [float(run.step(batch, _nearest)) for batch in run.batches(DATA)]


def test_a_loss_that_needs_two_samples_gets_them() -> None:
    runs = [run_ranks(_compare, num, parity)[0] for parity, num in itertools.product(("numeric", "bitwise"), (1, 2))]
    assert runs[2] == runs[3]
    for run in runs[1:]:
        assert run == pytest.approx(runs[0], abs=1e-12)
