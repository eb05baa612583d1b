"""`parameter_server_async` as users know it: a job, any number of workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline import env
from paceline.models.lenet import lenet
from paceline.spec import Job, Plan, RunRecord
from paceline.train.loop import RunOutput, train
from tests.kit.workers import run_ranks
from tests.old.ranks.training import loss_fn, measure

pytestmark = pytest.mark.slow


def _job(**values: Any) -> Job:
    return Job.from_mapping(
        {
            "global_batch_size": 100,
            "virtual_shards": 4,
            "epochs": 2,
            "model": {"name": "resnet20"},
            "data": {
                "name": "synthetic",
                "train_limit": 330,
                "test_limit": 50,
                "options": {"shape": [3, 16, 16]},
            },
            "optim": {"lr": 0.05, "momentum": 0.9, "schedule": "cosine", "warmup_epochs": 0.5},
        }
        | values
    )


def _train(job: Job, run_dir: Path, num_servers: int = 1, max_steps: int | None = None) -> RunRecord:
    run_dir.mkdir(exist_ok=True)
    plan = Plan(
        world_size=env.worker_facts().world_size,
        algorithm="tree_exact" if job.parity == "bitwise" else "auto",
        num_servers=num_servers,
        timeout_s=30,
    )
    return train(job, plan, RunOutput(run_dir, None), max_steps)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """What one worker comes to, bit for bit."""
    record: RunRecord = run_ranks(_train, 1, _job(parity="bitwise"), tmp_path_factory.mktemp("alone"))[0]
    return record


@pytest.mark.parametrize(("world_size", "num_servers"), [(2, 1), (3, 2)])
def test_staleness_0_is_synchronous_training_bit_for_bit(
    world_size: int, num_servers: int, alone: RunRecord, tmp_path: Path
) -> None:
    job = _job(aggregation={"method": "parameter_server_async", "staleness": 0})
    records = run_ranks(_train, world_size, job, tmp_path / "spread", num_servers)
    assert {record.weights_sha256 for record in records} == {alone.weights_sha256}
    for record in records:
        assert record.steps == alone.steps == 8
        assert record.samples_seen == 660
        assert [epoch.train_loss for epoch in record.epochs] == [epoch.train_loss for epoch in alone.epochs]
        assert [epoch.metrics for epoch in record.epochs] == [epoch.metrics for epoch in alone.epochs]
        assert record.epochs[-1].lr == pytest.approx(alone.epochs[-1].lr)
        assert "result is that of synchronous training" in record.notes[0]


def test_a_stale_run_learns_the_same_on_two_workers_and_on_three(tmp_path: Path) -> None:
    digits = {"model": "lenet", "data": "digits", "epochs": 5, "global_batch_size": 64, "virtual_shards": 4}
    job = _job(**digits, aggregation={"method": "parameter_server_async", "staleness": 1})
    two = run_ranks(_train, 2, job, tmp_path / "two", timeout_s=100)
    three = run_ranks(_train, 3, job, tmp_path / "three", 2, timeout_s=100)
    assert len({record.weights_sha256 for record in (*two, *three)}) == 1
    accuracy = two[0].accuracy
    assert accuracy is not None
    assert accuracy > 0.85  # 97 % without staleness
    assert "that are 1 update late" in two[0].notes[0]


@pytest.mark.parametrize("sync_inside_nodes", [False, True])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(sync_inside_nodes: bool, alone: RunRecord, tmp_path: Path) -> None:
    aggregation = {"method": "parameter_server_async", "staleness": 0, "sync_inside_nodes": sync_inside_nodes}
    job = _job(aggregation=aggregation, checkpoint={"every_steps": 3})
    cut = run_ranks(_train, 3, job, tmp_path / "cut", 1 if sync_inside_nodes else 2, 6)
    assert {record.steps for record in cut} == {6}
    records = run_ranks(_train, 2, job, tmp_path / "cut")
    assert {record.weights_sha256 for record in records} == {alone.weights_sha256}
    for record in records:
        assert (record.steps, record.samples_seen) == (8, 660)
        assert record.epochs[0].train_loss == alone.epochs[0].train_loss
        assert record.epochs[-1].metrics == alone.epochs[-1].metrics
        assert record.epochs[-1].lr == pytest.approx(alone.epochs[-1].lr)
        assert any(note.startswith("resumed at step 6 ") for note in record.notes)


class _Signalling(nn.Module):
    """A model that sends its own process SIGUSR1 in one of its forward passes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = lenet(**options)
        self.num_passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.num_passes += 1
            if self.num_passes == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
        output: Tensor = self.inner(inputs)
        return output


def test_all_rest_to_save_when_one_wishes_it_and_go_on(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "model": f"{__name__}:_Signalling",
        "data": "digits",
        "epochs": 1,
        "global_batch_size": 64,
    }
    never = {"every_minutes": None, "every_epoch": False, "save_final": False}
    (alone,) = run_ranks(_train, 1, _job(**values, parity="bitwise", checkpoint=never), tmp_path / "alone")
    aggregation = {"method": "parameter_server_async", "staleness": 0}
    job = _job(**values, aggregation=aggregation, checkpoint=never)
    records = run_ranks(_train, 2, job, tmp_path / "run")
    assert {record.weights_sha256 for record in records} == {alone.weights_sha256}
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    at_wish, at_end = (int(name.removeprefix("step-")) for name in names)
    assert 0 < at_wish < at_end == alone.steps


class _Counted:
    """A map-style data set that counts how many of its samples are read."""

    def __init__(self, num_samples: int) -> None:
        draw = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(num_samples, 6, generator=draw)
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        self.num_read += 1
        return self.inputs[number], number % 10


def _own_loop(values: dict[str, Any], spoil: str = "") -> tuple[str, list[float], list[float], int]:
    """A script of one's own: the weights' fingerprint, losses, metrics of both epochs, and samples read to train."""
    plan = Plan(world_size=env.worker_facts().world_size, timeout_s=30)
    schedule = {"schedule": "cosine", "warmup_epochs": 0.5}
    job = Job.from_mapping({"global_batch_size": 6, "virtual_shards": 3, "epochs": 2, "optim": schedule, **values})
    train_set, test_set = _Counted(20), _Counted(7)
    losses, metrics = [], []
    with paceline.init(job, plan=plan) as run:
        model = nn.Linear(6, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run.prepare(model, optimizer)
        for epoch in run.epochs():
            for inputs, targets in run.batches(train_set, epoch):
                if spoil == "changed":
                    inputs = inputs + 1.0
                losses.append(float(run.step((inputs, targets), loss_fn)))
                if spoil == "evaluated":
                    run.evaluate(test_set, measure)
            metrics.append(run.evaluate(test_set, measure)["loss"])
        return run.weights_sha256(), losses, metrics, train_set.num_read


def test_a_script_of_ones_own_trains_like_any_other() -> None:
    ((sha, losses, metrics, num_read),) = run_ranks(_own_loop, 1, {"parity": "bitwise"})
    assert num_read == 40 + 1  # one sample is read again, to see whether it is the same
    aggregation = {"aggregation": {"method": "parameter_server_async", "staleness": 0}}
    workers = run_ranks(_own_loop, 2, aggregation)
    for their_sha, their_losses, their_metrics, _ in workers:
        assert (their_sha, their_losses, their_metrics) == (sha, losses, metrics)
    # Nobody reads what others compute, but for one sample an epoch that stands for batches of the script's loop, and
    # a shard of two samples an epoch that workers compare. The first sample of all is read again wherever it is read.
    assert sum(their_num_read for *_, their_num_read in workers) == 40 + 2 * 2 * (1 + 2) + 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("changed", "ModelError.*changed in a batch before run.step would be lost"),
        ("evaluated", "JobError.*agree on at the end of an epoch only"),
    ],
)
def test_what_a_script_cannot_do_with_asynchronous_servers_is_said(spoil: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_ranks(_own_loop, 2, {"aggregation": {"method": "parameter_server_async"}}, spoil)
