"""A step whose loss or gradient is not a number: all workers see it, name it, and do the same about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

import paceline
from paceline import models
from paceline.env import worker_facts
from paceline.spec import Job, Plan
from paceline.train.optimizers.optim import build_optimizer
from paceline.train.session.state import Trained
from tests.kit.workers import run_ranks
from tests.old.ranks.training import images, loss_fn

BAD_STEPS = (3, 4)


def _train(
    values: dict[str, Any], folder: str | None, bad_steps: tuple[int, ...], max_steps: int | None = None
) -> tuple[str, list[str], bool]:
    """The weights' fingerprint, what was said, and whether all weights and running statistics are finite."""
    job = Job.from_mapping(
        {
            "global_batch_size": 12,
            "virtual_shards": 6,
            "epochs": 2,
            "model": "resnet20",
            "optim": {"lr": 0.02},
            **values,
        }
    )
    world_size = worker_facts().world_size
    plan = Plan(
        world_size=world_size, algorithm="tree_exact" if job.parity == "bitwise" else "all_reduce", timeout_s=60
    )
    said: list[str] = []
    with paceline.init(job, plan=plan, max_steps=max_steps, checkpoint_dir=folder) as run:
        run.say = said.append
        train_set = images(60)
        model = models.build(job.model, num_classes=10, in_channels=3, image_size=8)
        model, _ = run.prepare(model, build_optimizer(job.optim, model))

        def poisoned(model: nn.Module, batch: Any) -> Tensor:
            # Only the last worker's samples are bad.
            bad = run.steps in bad_steps and run.rank == run.world_size - 1
            return loss_fn(model, batch) * (float("nan") if bad else 1.0)

        for batch in run.batches(train_set):
            run.step(batch, poisoned)
        finite = all(bool(t.isfinite().all()) for t in run.model.state_dict().values())
        return run.weights_sha256(), said, finite


@pytest.mark.parametrize("parity", ["numeric", "bitwise"])
def test_a_bad_step_is_skipped_by_all(parity: str) -> None:
    clean = run_ranks(_train, 2, {"parity": parity}, None, ())
    skipped = run_ranks(_train, 2, {"parity": parity}, None, BAD_STEPS)
    assert len({sha for sha, _, _ in skipped}) == 1
    assert skipped[0][0] != clean[0][0]
    for _, said, finite in skipped:
        assert finite
        assert len(said) == len(BAD_STEPS)
        assert said[0].startswith("Step 4: the loss is nan and the gradient of '")
        assert "its batch is samples" in said[0]


def test_weights_go_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    """Steps 1 and 2 were saved, step 3 was not: what it learned is lost, and no batch comes twice."""
    values = {"parity": "bitwise", "nonfinite": "rollback", "checkpoint": {"every_steps": 2}}
    one = run_ranks(_train, 1, values, str(tmp_path / "one"), (3,))
    two = run_ranks(_train, 2, values, str(tmp_path / "two"), (3,))
    assert {sha for sha, _, _ in two} == {sha for sha, _, _ in one}
    assert "again those of step-00000002" in two[0][1][0]


def test_without_a_way_on_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ModelError: Step 4.*The run ends"):
        run_ranks(_train, 2, {"nonfinite": "stop"}, None, (3,))
    with pytest.raises(AssertionError, match=r"ModelError: Step 1.*no checkpoint yet"):
        run_ranks(_train, 1, {"nonfinite": "rollback"}, str(tmp_path), (0,))
    with pytest.raises(AssertionError, match=r"ModelError: Step 10.*10th in a row"):
        run_ranks(_train, 1, {"epochs": 4}, None, tuple(range(20)))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("reaction", ["skip", "rollback"])
def test_a_resumed_run_goes_on_counting(tmp_path: Path, reaction: str, before: int, after: int) -> None:
    bad_steps = tuple(range(2, 20))
    values = {"epochs": 4, "nonfinite": reaction, "checkpoint": {"every_steps": 2}}
    run_ranks(_train, before, values, str(tmp_path), bad_steps, 7)
    for _ in "resumed", "and once more from what was saved of the step that ended it":
        with pytest.raises(AssertionError, match=r"ModelError: Step 12.*10th in a row"):
            run_ranks(_train, after, values, str(tmp_path), bad_steps)
    # As with a lower learning rate, which is what the sentence asks for.
    run_ranks(_train, after, values, str(tmp_path), (), 13)
    with pytest.raises(AssertionError, match=r"ModelError: Step 23.*10th in a row"):
        run_ranks(_train, 1, values | {"epochs": 6}, str(tmp_path), tuple(range(13, 40)))


def test_workers_that_train_alone_count_alone(tmp_path: Path) -> None:
    """Only the last worker's samples are bad, and rank 0 saves for all."""
    values = {"epochs": 4, "aggregation": {"method": "local_sgd", "sync_every": 2}}
    run_ranks(_train, 2, values, str(tmp_path), tuple(range(2, 20)), 8)
    with pytest.raises(AssertionError, match=r"ModelError: Step 12.*10th in a row"):
        run_ranks(_train, 2, values, str(tmp_path), tuple(range(2, 20)))


def _train_as_before_it_was_kept(*args: Any) -> None:
    take = Trained.take

    def without_count(self: Trained) -> tuple[dict[str, Any], dict[str, Any]]:
        shared, own = take(self)
        return {key: value for key, value in shared.items() if key != "nonfinite_in_a_row"}, own

    with mock.patch.object(Trained, "take", without_count):
        _train(*args)


def test_a_checkpoint_of_an_earlier_version_begins_at_none(tmp_path: Path) -> None:
    run_ranks(_train_as_before_it_was_kept, 1, {"epochs": 4}, str(tmp_path), tuple(range(2, 20)), 7)
    with pytest.raises(AssertionError, match=r"ModelError: Step 17.*10th in a row"):
        run_ranks(_train, 1, {"epochs": 4}, str(tmp_path), tuple(range(2, 20)))
