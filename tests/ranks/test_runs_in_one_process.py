"""Several runs in one process, as in a sweep: what a run has made is gone when it, and what it trained, is."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.parallel import Engine
from paceline.spec import Job, Plan, parse_mesh
from tests.ranks.harness import run_ranks

DATA = TensorDataset(torch.randn(16, 6), torch.randn(16, 1))


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _train(strategy: str, micro_batch_size: int | str | None) -> weakref.ref[Engine]:
    num_workers = worker_facts().world_size
    job = Job().with_values(global_batch_size=8, virtual_shards=8, micro_batch_size=micro_batch_size)
    plan = Plan(world_size=num_workers, algorithm="hierarchical", timeout_s=60, mesh=parse_mesh(strategy, num_workers))
    with paceline.init(job, plan=plan, progress=False) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), example=torch.zeros(2, 6))
        for batch in run.batches(DATA):
            run.step(batch, _loss)
        return weakref.ref(run.engine)


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _train_often(strategy: str, micro_batch_size: int | str | None) -> tuple[list[int], bool]:
    """The threads after each run, and whether the last run's engine is still there."""
    found = []
    for _ in range(4):
        engine = _train(strategy, micro_batch_size)
        gc.collect()
        found.append(_num_threads())
    return found, engine() is not None


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("strategy", "micro_batch_size"), [("dp", None), ("dp", "auto"), ("fsdp", None), ("pp", None), ("dp2 x pp2", None)]
)
def test_nothing_is_left_of_a_run(strategy: str, micro_batch_size: int | str | None) -> None:
    for (_, second, third, fourth), is_there in run_ranks(_train_often, 4, strategy, micro_batch_size):
        assert second == third == fourth
        assert not is_there
