"""What a script draws on a GPU for the samples of a batch before `run.step`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan
from tests.kit.sim_gpu.observing import Observer
from tests.kit.sim_gpu.workers import run_on_gpus

pytestmark = pytest.mark.sim_gpu

INPUTS = torch.randn(38, 4, generator=torch.Generator().manual_seed(0))


def _trained(native: Any) -> tuple[list[float], list[str]]:
    """The losses, and for what the host waited while noise was drawn."""
    job = Job(global_batch_size=8, virtual_shards=4, precision="float64")
    plan = Plan(worker_facts().world_size, algorithm="all_reduce", timeout_s=60, device_kind="cuda")
    waits: list[str] = []
    losses: list[float] = []
    with paceline.init(job, plan=plan, progress=False) as run:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for (batch,) in run.batches(TensorDataset(INPUTS), sampler=lambda _seed, _epoch: range(38)):
            observer = Observer(native)
            with observer:
                scale = torch.rand(1, 4, device=batch.device)
                noise = torch.randn_like(batch) * torch.rand(len(batch), 1, device=batch.device)
                dropped = nn.functional.dropout(batch, 0.3)
            waits += [str(act) for act in observer.acts if act.kind == "synchronisation" and len(losses) > 3]
            loss = run.step([dropped + noise * scale], lambda model, batch: model(batch[0]).square().mean())
            losses.append(float(loss))
        assert not [note for note in run.notes if "run.step" in note]
    return losses, waits


def test_noise_drawn_on_a_gpu_is_the_same_on_any_number_of_workers(simulated_gpu: Path) -> None:
    ((alone, waits),) = run_on_gpus(simulated_gpu, _trained, 1, num_gpus=1)
    assert not waits
    for losses, _ in run_on_gpus(simulated_gpu, _trained, 2, num_gpus=2):
        np.testing.assert_allclose(losses, alone, rtol=1e-9)
