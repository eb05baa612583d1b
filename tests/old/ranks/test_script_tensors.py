"""Tensors that a script changes between steps: refused if the loss follows from them and workers have other values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import DivergenceError
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks

INPUTS = torch.randn(19, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))
"""Two batches of 8 samples, and one of 3 that leaves the last of four workers without any."""


class _Centred(nn.Module):
    """A loss with a centre, which is no part of the model."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4, dtype=torch.float64))
        self.last = torch.zeros(4, dtype=torch.float64)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        loss = (model(batch[0] - self.center) - batch[1]).square().mean()
        return loss, {f"mean {place}": batch[0][:, place].mean() for place in range(4)}


def _train(kind: str, strategy: str) -> list[float] | str:
    num_workers = worker_facts().world_size
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    plan = Plan(world_size=num_workers, algorithm="all_reduce", timeout_s=60, mesh=mesh)
    criterion = _Centred()
    center = torch.zeros(4, dtype=torch.float64)

    def with_variable(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = (model(batch[0] - center) - batch[1]).square().mean()
        return loss

    job = Job(global_batch_size=8, virtual_shards=4, precision="float64")
    losses: list[float] = []
    try:
        with paceline.init(job, plan=plan, max_steps=4, progress=False) as run:
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.batches(DATA):
                losses.append(float(run.step(batch, with_variable if kind == "variable" else criterion)))
                own = 0.9 * criterion.center + 0.1 * batch[0].mean(0)
                if kind == "buffer":
                    criterion.center = own
                elif kind == "in place":
                    criterion.center.copy_(own)
                elif kind == "variable":
                    center = own
                elif kind == "not used":
                    criterion.last = own
                else:  # the mean over the global batch
                    criterion.center = torch.stack([run.values[f"mean {place}"] for place in range(4)])
    except DivergenceError as refusal:
        return str(refusal)
    return losses


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
@pytest.mark.parametrize("kind", ["buffer", "in place", "variable"])
def test_what_a_worker_computes_of_its_samples_is_refused(kind: str, strategy: str) -> None:
    for sentence in run_ranks(_train, 2, kind, strategy):
        assert "The loss function computes with 'center', which the script changed" in str(sentence)


@pytest.mark.parametrize(("strategy", "num_workers"), [("dp", 2), ("dp", 4), ("fsdp", 2), ("pp", 2)])
@pytest.mark.parametrize("kind", ["not used", "global mean"])
def test_what_does_not_matter_or_is_alike_is_taken(kind: str, strategy: str, num_workers: int) -> None:
    (alone,) = run_ranks(_train, 1, kind, "dp")
    for losses in run_ranks(_train, num_workers, kind, strategy):
        assert losses == pytest.approx(alone, rel=1e-12)


def _moving(kept: str, folder: str) -> list[str]:
    """The notes of a run whose script moves the centre of its loss, and keeps something."""
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    job = Job(global_batch_size=8, virtual_shards=4, precision="float64")
    criterion = _Centred()
    with paceline.init(job, plan=plan, max_steps=4, progress=False, checkpoint_dir=folder) as run:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if kept == "criterion":
            run.keep("criterion", criterion)
        for batch in run.batches(DATA):
            run.step(batch, criterion)
            if kept != "not moved":
                criterion.center = torch.stack([run.values[f"mean {place}"] for place in range(4)])
        return [note for note in run.notes if "no checkpoint holds them" in note]


@pytest.mark.parametrize(("kept", "num_notes"), [("nothing", 1), ("criterion", 0), ("not moved", 0)])
def test_what_no_checkpoint_holds_is_told_once(tmp_path: Path, kept: str, num_notes: int) -> None:
    for workers in (1, 2):
        for notes in run_ranks(_moving, workers, kept, str(tmp_path / str(workers))):
            assert len(notes) == num_notes and all("(center)" in note for note in notes)
