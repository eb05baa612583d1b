"""The law on real images: the same bits on any number of workers. Decoded arrays stay in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline import data
from paceline.spec import Job
from tests.kit.workers import run_ranks
from tests.old.ranks.training import Outcome, train

_DATA = os.environ.get("PACELINE_TEST_DATA")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(_DATA is None, reason="PACELINE_TEST_DATA names no folder with mnist/ and cifar10/"),
]


def _job(name: str, model: Any, augment: list[str], train_limit: int = 100, **values: Any) -> Job:
    assert _DATA is not None
    return Job.from_mapping(
        {
            "global_batch_size": 12,
            "virtual_shards": 6,
            "epochs": 4,
            "parity": "bitwise",
            "model": model,
            "data": {
                "name": name,
                "dir": str(Path(_DATA) / name),
                "train_limit": train_limit,
                "test_limit": 31,
                "augment": augment,
            },
            "optim": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4, "schedule": "cosine", "warmup_epochs": 1.0},
            "channels_last": True,
            "eval_batch_size": 25,
            **values,
        }
    )


def _train(job: Job, num_steps: int) -> Outcome:
    return train(job, *data.load(job.data), num_steps)


def _check(job: Job, num_steps: int, *world_sizes: int) -> None:
    (alone,) = run_ranks(_train, 1, job, num_steps, timeout_s=300)
    assert len(alone.losses) == num_steps
    assert alone.losses[-1] != alone.losses[0]
    for world_size in world_sizes:
        for outcome in run_ranks(_train, world_size, job, num_steps, timeout_s=300):
            assert outcome.sha == alone.sha
            assert outcome.losses == alone.losses
            assert outcome.metrics == alone.metrics


# The samples divide neither by the batch nor by the shards, and an epoch ends in the middle of the run.


def test_lenet_on_mnist() -> None:
    _check(_job("mnist", "lenet", [], global_batch_size=24), 20, 2, 3, 4)


@pytest.mark.parametrize(
    ("model", "train_limit", "num_steps"),
    [({"name": "resnet20"}, 100, 11), ({"name": "resnet18", "options": {"stem": "cifar"}}, 40, 6)],
    ids=["resnet20", "resnet18"],
)
def test_resnets_on_cifar10(model: Any, train_limit: int, num_steps: int) -> None:
    _check(_job("cifar10", model, ["crop", "flip", "cutout"], train_limit), num_steps, 2)
