"""Steps that go wrong on simulated GPUs: losses that are not numbers, memory that runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import paceline
from paceline import models
from paceline.env import worker_facts
from paceline.errors import ModelError
from paceline.spec import Job, Plan
from paceline.train.optimizers.optim import build_optimizer
from tests.kit.sim_gpu.workers import run_on_gpus
from tests.kit.workers import run_ranks
from tests.old.ranks.training import images, loss_fn

pytestmark = [pytest.mark.sim_gpu, pytest.mark.slow]

BAD_STEP = 1


def _train(kind: str) -> dict[str, tuple[str, list[str]]]:
    """The weights' fingerprint and what was said, with a bad step on the last worker alone, by parity."""
    return {parity: _train_with(kind, parity) for parity in ("numeric", "bitwise")}


def _train_with(kind: str, parity: str) -> tuple[str, list[str]]:
    job = Job.from_mapping(
        {"global_batch_size": 16, "virtual_shards": 4, "parity": parity, "model": "lenet", "optim": {"lr": 0.01}}
    )
    algorithm = "tree_exact" if parity == "bitwise" else "all_reduce"
    plan = Plan(worker_facts().world_size, device_kind=kind, algorithm=algorithm, timeout_s=120)  # type: ignore[arg-type]
    said: list[str] = []
    with paceline.init(job, plan=plan, max_steps=4) as run:
        run.say = said.append
        model = models.build(job.model, num_classes=10, in_channels=1, image_size=28)
        model, _ = run.prepare(model, build_optimizer(job.optim, model))

        def poisoned(model: nn.Module, batch: Any) -> Tensor:
            is_bad = run.steps == BAD_STEP and run.rank == run.world_size - 1
            return loss_fn(model, batch) * (float("nan") if is_bad else 1.0)

        for batch in run.batches(images(64, (1, 28, 28))):
            run.step(batch, poisoned)
        assert all(bool(value.isfinite().all()) for value in run.model.state_dict().values())
        return run.weights_sha256(), said


def test_a_step_that_is_not_finite_is_skipped_as_on_cpus(simulated_gpu: Path) -> None:
    on_gpus = run_on_gpus(simulated_gpu, _train_on_gpus, 2)
    on_cpus = run_ranks(_train, 2, "cpu", timeout_s=240)
    for parity in ("numeric", "bitwise"):
        assert len({outcome[parity][0] for outcome in on_gpus}) == 1
        assert on_gpus[0][parity][1] == on_cpus[0][parity][1]
    assert on_gpus[0]["bitwise"][0] == on_cpus[0]["bitwise"][0]


def _train_on_gpus(native: Any) -> dict[str, tuple[str, list[str]]]:
    return _train("cuda")


def test_memory_that_runs_out_is_said_in_one_sentence_and_more_shards_fit(simulated_gpu: Path) -> None:
    run_on_gpus(simulated_gpu, _out_of_memory, 1, memory_bytes=24 * 2**20)


def _out_of_memory(native: Any) -> None:
    assert len(_train_in_shards(virtual_shards=16)) == 2
    with pytest.raises(ModelError, match=r"Memory ran out .* one shard of 64 samples"):
        _train_in_shards(virtual_shards=1)


def _train_in_shards(virtual_shards: int) -> list[float]:
    values = {"global_batch_size": 64, "virtual_shards": virtual_shards}
    job = Job.from_mapping({**values, "model": "resnet20"})
    with paceline.init(job, plan=Plan(1, device_kind="cuda"), max_steps=2) as run:
        model = models.build(job.model, num_classes=10, in_channels=3, image_size=16)
        model, _ = run.prepare(model, build_optimizer(job.optim, model))
        return [float(run.step(batch, loss_fn)) for batch in run.batches(images(128, (3, 16, 16)))]
