"""What a script does at the end of an epoch happens once an epoch, also where a run was stopped in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan
from tests.ranks.harness import run_ranks

JOB = Job(global_batch_size=8, virtual_shards=4, epochs=4, precision="float64")
"""Three batches an epoch."""
INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class _Ends:
    """At which steps epochs have ended."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


def _train(folder: str, max_steps: int | None = None, stops_at: int | None = None) -> tuple[list[int], float, str]:
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    with paceline.init(JOB, plan=plan, max_steps=max_steps, checkpoint_dir=folder, progress=False) as run:
        model = nn.Linear(4, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler, ends = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), _Ends()
        run.keep("scheduler", scheduler)
        run.keep("ends", ends)
        for epoch in run.epochs():
            for batch in run.batches(TensorDataset(INPUTS), epoch):
                run.step(batch, lambda model, batch: (model(batch[0]) - 1).square().mean())
                if run.steps == stops_at:
                    run.stop("enough")
            run.evaluate(TensorDataset(INPUTS), lambda model, batch: {"output": model(batch[0]).squeeze(1)})
            scheduler.step()
            ends.steps.append(run.steps)
        return ends.steps, optimizer.param_groups[0]["lr"], run.weights_sha256()


@pytest.mark.parametrize("stop", [{"max_steps": 4}, {"max_steps": 6}, {"stops_at": 4}])
def test_a_run_that_goes_on_ends_its_epochs_as_one_without_a_pause(tmp_path: Path, stop: dict[str, int]) -> None:
    ((ends, rate, sha),) = run_ranks(_train, 1, str(tmp_path / "whole"))
    assert ends == [3, 6, 9, 12]
    first = run_ranks(_train, 1, str(tmp_path / "parts"), stop.get("max_steps"), stop.get("stops_at"))
    assert len(first[0][0]) == 2  # it ends with the epoch in which it stops
    assert run_ranks(_train, 1, str(tmp_path / "parts")) == [(ends, rate, sha)]
