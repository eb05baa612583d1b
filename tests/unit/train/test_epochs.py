"""What a script does at the end of an epoch happens once for each, also where the run was stopped in between and
resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import JobError


def train(folder: Path, max_steps: int | None = None) -> tuple[list[int], float, str]:
    """At which steps epochs of three steps ended, each with other data, the learning rate, and the fingerprint of the
    weights."""
    with paceline.init(
        global_batch_size=8, virtual_shards=4, epochs=4, max_steps=max_steps, checkpoint_dir=folder, progress=False
    ) as run:
        model = nn.Linear(4, 1)
        nn.init.ones_(model.weight)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler, ends = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), {"steps": list[int]()}
        run.keep("scheduler", scheduler)
        run.keep("ends", ends)
        samples = torch.linspace(-1, 1, 96).view(24, 4)
        for epoch in run.epochs():
            for batch in run.batches(TensorDataset(samples[epoch:]), epoch):
                run.step(batch, lambda model, shard: (model(shard[0]) - 1).square().mean())
            scheduler.step()
            ends["steps"].append(run.steps)
        return ends["steps"], optimizer.param_groups[0]["lr"], run.weights_sha256()


@pytest.mark.parametrize("stop", [2, 3, 4, 6, 12])
def test_a_run_that_goes_on_ends_its_epochs_as_one_without_a_pause(tmp_path: Path, stop: int) -> None:
    whole = train(tmp_path / "whole")
    assert whole[0] == [3, 6, 9, 12] and whole[1] == pytest.approx(0.1 / 16)
    train(tmp_path / "stopped", max_steps=stop)
    assert train(tmp_path / "stopped") == whole


@pytest.mark.parametrize(("epoch", "num_steps"), [(None, 2), (0, 1)])
def test_an_epoch_is_not_trained_on_twice(epoch: int | None, num_steps: int) -> None:
    samples = list(torch.linspace(-1, 1, 32).view(8, 4))
    with paceline.init(global_batch_size=8, epochs=2, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(JobError, match=r"run\.batches\(data, epoch\)"):
            for _ in range(2):
                for batch in run.batches(samples, epoch):
                    run.step(batch, lambda model, shard: model(shard).square().mean())
        assert run.steps == num_steps
