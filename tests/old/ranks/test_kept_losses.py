"""What a step returns stays what it was, and sparse gradients are trained by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks


def _mean_square(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def _kept_and_read(parity: str) -> tuple[list[float], list[float]]:
    """The losses of all steps, read after the last one, and each read at once."""
    kept, read = [], []
    job = Job.from_mapping({"global_batch_size": 8, "virtual_shards": 4, "epochs": 1, "parity": parity})
    with paceline.init(job, plan=Plan()) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for batch in run.batches(TensorDataset(torch.randn(40, 4))):
            kept.append(run.step(batch, _mean_square))
            read.append(float(kept[-1]))
    return [float(loss) for loss in kept], read


@pytest.mark.parametrize("parity", ["numeric", "bitwise"])
def test_a_loss_that_is_read_later_is_that_of_its_step(parity: str) -> None:
    ((later, at_once),) = run_ranks(_kept_and_read, 1, parity)
    assert later == at_once and len(set(later)) == 5


def _sparse() -> tuple[bool, int]:
    job = Job(global_batch_size=8, virtual_shards=4, epochs=1)
    with paceline.init(job, plan=Plan()) as run:
        model = nn.Embedding(10, 4, sparse=True)
        before = model.weight.detach().clone()
        run.prepare(model, torch.optim.SparseAdam(list(model.parameters()), 0.1))
        for batch in run.batches(TensorDataset(torch.randint(0, 10, (40, 3)))):
            run.step(batch, _mean_square)
        return bool((model.weight != before).any()), run.steps


def test_sparse_gradients_are_trained_by() -> None:
    assert run_ranks(_sparse, 1) == [(True, 5)]
