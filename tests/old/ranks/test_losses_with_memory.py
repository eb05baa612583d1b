"""A loss that follows from what earlier calls of its function left behind is refused; one that only keeps it is not."""

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

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class _Meter:
    mean = 1.0


def _train(kind: str, parity: str) -> list[float] | str:
    plan = Plan(
        world_size=worker_facts().world_size,
        algorithm="tree_exact" if parity == "bitwise" else "all_reduce",
        timeout_s=60,
    )
    mean, meter, history = 1.0, _Meter(), [1.0]

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        nonlocal mean
        loss: Tensor = (model(batch[0]) - 1).square().mean()
        mean = 0.9 * mean + 0.1 * loss.item()
        meter.mean = 0.9 * meter.mean + 0.1 * loss.item()
        history.append(loss.item())
        by = {"variable": mean, "attribute": meter.mean, "list": sum(history[-4:]), "log": 1.0}[kind]
        return loss / by

    losses = []
    job = Job.from_mapping({"global_batch_size": 8, "virtual_shards": 4, "parity": parity, "precision": "float64"})
    try:
        with paceline.init(job, plan=plan, progress=False) as run:
            model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            losses = [float(run.step(batch, loss_fn)) for batch in run.batches(TensorDataset(INPUTS))]
    except ModelError as refusal:
        return str(refusal)
    return losses


@pytest.mark.parametrize("kind", ["variable", "attribute", "list"])
@pytest.mark.parametrize(("parity", "num_workers"), [("numeric", 1), ("numeric", 2), ("bitwise", 1)])
def test_a_loss_that_follows_from_earlier_calls_is_refused(kind: str, parity: str, num_workers: int) -> None:
    for sentence in run_ranks(_train, num_workers, kind, parity):
        assert "it follows from what earlier calls left behind" in str(sentence)


@pytest.mark.parametrize("parity", ["numeric", "bitwise"])
def test_what_is_kept_for_a_log_is_not(parity: str) -> None:
    one, two = run_ranks(_train, 1, "log", parity), run_ranks(_train, 2, "log", parity)
    assert len(one[0]) == 3
    assert two == [pytest.approx(one[0], rel=1e-12)] * 2
