"""Several runs in one process, as in a sweep: the engine of a run is gone when the run, and what it trained, is."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.parallel import Engine
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks

DATA = TensorDataset(torch.randn(16, 6), torch.randn(16, 1))


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _train(strategy: str) -> weakref.ref[Engine]:
    num_workers = worker_facts().world_size
    job = Job().with_values(global_batch_size=8, virtual_shards=8)
    plan = Plan(world_size=num_workers, algorithm="hierarchical", timeout_s=60, mesh=parse_mesh(strategy, num_workers))
    with paceline.init(job, plan=plan, progress=False) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), example=torch.zeros(2, 6))
        for batch in run.batches(DATA):
            run.step(batch, _loss)
        return weakref.ref(run.engine)


def _is_there(strategy: str) -> bool:
    engine = _train(strategy)
    gc.collect()
    return engine() is not None


@pytest.mark.timeout(150)
@pytest.mark.parametrize("strategy", ["dp", "fsdp", "pp", "dp2 x pp2"])
def test_no_engine_outlives_its_run(strategy: str) -> None:
    assert run_ranks(_is_there, 4, strategy) == [False] * 4
