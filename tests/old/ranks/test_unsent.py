"""What lossy compressors have not sent when a run is saved is not lost where it goes on with other workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

DATA = TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64))


def _loss(model: nn.Module, batch: Any) -> Tensor:
    """Its gradient does not depend on the weights, so that these tell the sum of all gradients that were used."""
    loss: Tensor = (model(batch[0]) * batch[0][:, :5]).sum(1).mean()
    return loss


def _train(aggregation: dict[str, Any], folder: Path | None, max_steps: int) -> tuple[NDArray[Any], int]:
    values = {"global_batch_size": 12, "virtual_shards": 6, "epochs": 2, "precision": "float64"}
    job = Job().with_values(**values, aggregation=aggregation)
    plan = Plan(worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    with paceline.init(job, plan=plan, checkpoint_dir=folder, max_steps=max_steps, progress=False) as run:
        model = nn.Linear(6, 5)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(DATA):
            run.step(batch, _loss)
        return run.whole_state()["weight"].detach().numpy().copy(), len(run.engine.own_state().get("sums", {}))


@pytest.mark.parametrize("method", ["every_step", "local_sgd"])
@pytest.mark.parametrize("wire", ["topk", "powersgd", "randomk"])
def test_one_worker_that_goes_on_uses_what_several_had_not_sent(tmp_path: Path, wire: str, method: str) -> None:
    every = {"sync_every": 2} if method == "local_sgd" else {}
    aggregation = {"wire": wire, "density": 0.1, "method": method, **every}
    lossless = {"method": method, **every}
    ((exact_then, _),) = run_ranks(_train, 1, lossless, None, 4)
    ((exact, _),) = run_ranks(_train, 1, lossless, None, 6)
    (halfway, num_owed), _ = run_ranks(_train, 2, aggregation, tmp_path, 4)
    assert np.abs(halfway - exact_then).max() > 1e-3
    assert num_owed == (1 if wire == "powersgd" else 2)  # which sends the bias whole
    ((found, still_owed),) = run_ranks(_train, 1, aggregation, tmp_path, 6)
    np.testing.assert_allclose(found, exact, rtol=1e-12)
    assert still_owed == 0


def test_it_is_kept_from_run_to_run_until_a_step_is_made(tmp_path: Path) -> None:
    aggregation = {"wire": "topk", "density": 0.1}
    run_ranks(_train, 3, aggregation, tmp_path, 2)
    run_ranks(_train, 2, aggregation, tmp_path, 4)
    ((unchanged, num_owed),) = run_ranks(_train, 1, aggregation, tmp_path, 4)
    assert num_owed == 2
    ((exact_then, _),) = run_ranks(_train, 1, {}, None, 4)
    assert np.abs(unchanged - exact_then).max() > 1e-3
    ((exact, _),) = run_ranks(_train, 1, {}, None, 5)
    ((found, _),) = run_ranks(_train, 1, aggregation, tmp_path, 5)
    np.testing.assert_allclose(found, exact, rtol=1e-12)
