"""What a script does at the end of an epoch happens once an epoch, also where a run was stopped in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import open_storage
from paceline.checkpoint.load import read_manifest
from paceline.env import worker_facts
from paceline.errors import JobError
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

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


def _train(
    folder: str,
    max_steps: int | None = None,
    stops_at: int | None = None,
    leaves_at: int | None = None,
    fails_at: int | None = None,
) -> tuple[list[int], float, str]:
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
                if run.steps == leaves_at:
                    return ends.steps, optimizer.param_groups[0]["lr"], run.weights_sha256()
            run.evaluate(TensorDataset(INPUTS), lambda model, batch: {"output": model(batch[0]).squeeze(1)})
            scheduler.step()
            ends.steps.append(run.steps)
            if run.steps == fails_at:
                raise ValueError("a bug in the script")
        return ends.steps, optimizer.param_groups[0]["lr"], run.weights_sha256()


@pytest.mark.parametrize("stop", [{"max_steps": 4}, {"max_steps": 6}, {"stops_at": 4}])
def test_a_run_that_goes_on_ends_its_epochs_as_one_without_a_pause(tmp_path: Path, stop: dict[str, int]) -> None:
    ((ends, rate, sha),) = run_ranks(_train, 1, str(tmp_path / "whole"))
    assert ends == [3, 6, 9, 12]
    first = run_ranks(_train, 1, str(tmp_path / "parts"), stop.get("max_steps"), stop.get("stops_at"))
    assert len(first[0][0]) == 2  # it ends with the epoch in which it stops
    assert run_ranks(_train, 1, str(tmp_path / "parts")) == [(ends, rate, sha)]


@pytest.mark.parametrize("leaves_at", [4, 6])
def test_a_script_that_leaves_its_loop_has_not_come_to_the_end_of_the_epoch(tmp_path: Path, leaves_at: int) -> None:
    whole = run_ranks(_train, 1, str(tmp_path / "whole"))
    ((ends, *_),) = run_ranks(_train, 1, str(tmp_path / "parts"), None, None, leaves_at)
    assert ends == [3]
    assert run_ranks(_train, 1, str(tmp_path / "parts")) == whole


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_after_the_end_of_an_epoch_does_not_repeat_it(tmp_path: Path, num_workers: int) -> None:
    ((ends, rate, _),) = run_ranks(_train, 1, str(tmp_path / "whole"))
    run_ranks(_train, num_workers, str(tmp_path / "parts"), 4)
    with pytest.raises(AssertionError, match="a bug in the script"):
        run_ranks(_train, num_workers, str(tmp_path / "parts"), None, None, None, 6)
    for found in run_ranks(_train, num_workers, str(tmp_path / "parts")):
        assert found[:2] == (ends, rate)


def test_a_run_that_has_ended_with_an_epoch_has_no_other_one(tmp_path: Path) -> None:
    first = run_ranks(_train, 1, str(tmp_path), 6)
    assert run_ranks(_train, 1, str(tmp_path), 6) == first


def _train_all_epochs(folder: str, max_steps: int | None = None) -> tuple[list[int], list[str]]:
    """By a script that counts epochs itself."""
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    with paceline.init(JOB, plan=plan, max_steps=max_steps, checkpoint_dir=folder, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.keep("ends", ends := _Ends())
        for epoch in range(JOB.epochs):
            for batch in run.batches(TensorDataset(INPUTS), epoch):
                run.step(batch, lambda model, batch: (model(batch[0]) - 1).square().mean())
            ends.steps.append(run.steps)
        return ends.steps, run.notes


@pytest.mark.parametrize("max_steps", [4, 6])
def test_epochs_that_a_script_counts_itself(tmp_path: Path, max_steps: int) -> None:
    """What it does after the run's end is not saved, and that it ends epochs again is said."""
    run_ranks(_train_all_epochs, 1, str(tmp_path), max_steps)
    num_over = max_steps // 3
    ((ends, notes),) = run_ranks(_train_all_epochs, 1, str(tmp_path))
    before = [3, 6][:num_over]
    assert ends == before + num_over * [max_steps] + [6, 9, 12][num_over - 1 :]
    assert [note for note in notes if note.startswith("Epoch 0 was over when this run was saved")]


def _one_step_too_many(max_steps: int | None) -> str:
    with paceline.init(JOB, max_steps=max_steps, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss_fn = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
        for batch in run.batches(TensorDataset(INPUTS)):
            run.step(batch, loss_fn)
        with pytest.raises(JobError) as refused:
            run.step(batch, loss_fn)
        return str(refused.value)


def test_a_step_after_the_end_is_told_that_the_run_is_over() -> None:
    said = [run_ranks(_one_step_too_many, 1, max_steps)[0] for max_steps in (None, 2)]
    assert [sentence.partition(";")[0] for sentence in said] == [
        "The run has made all of its 12 steps",
        "The run has made all of its 2 steps",
    ]


def _save_before_and_after_an_evaluation(folder: str) -> dict[str, float]:
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    job = JOB.with_values(epochs=1, checkpoint={"keep_best": "output", "best_mode": "min"})
    with paceline.init(job, plan=plan, checkpoint_dir=folder, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(TensorDataset(INPUTS)):
            run.step(batch, lambda model, batch: model(batch[0]).square().mean())
        run.save()
        found = run.evaluate(TensorDataset(INPUTS), lambda model, batch: {"output": model(batch[0]).squeeze(1)})
        run.save()
    return found


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_checkpoint_has_the_metrics_of_an_evaluation_that_came_after_it(tmp_path: Path, num_workers: int) -> None:
    found = run_ranks(_save_before_and_after_an_evaluation, num_workers, str(tmp_path))
    storage = open_storage(str(tmp_path))
    assert storage.read("best") == storage.read("latest") == b"step-00000003\n"
    assert read_manifest(storage, "step-00000003").metrics == found[0]
