"""A run that was interrupted ends as one that was not: at any number of workers, in the middle of an epoch too."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline import models
from paceline.env import worker_facts
from paceline.spec import Job, Plan
from paceline.train.loop import RunOutput, train
from paceline.train.optimizers.optim import build_optimizer
from paceline.train.records.digest import weights_sha256
from tests.kit.workers import run_ranks
from tests.old.ranks.training import images, loss_fn, measure

STEPS, STOP = 10, 7
"""5 batches an epoch: it stops in the middle of the second."""


def _job(**values: Any) -> Job:
    return Job.from_mapping(
        {
            "global_batch_size": 12,
            "virtual_shards": 6,
            "epochs": 2,
            "parity": "bitwise",
            "model": "lenet",
            "optim": {"name": "adam", "lr": 0.01, "schedule": "cosine", "clip_norm": 1.0},
            **values,
        }
    )


class _Seen:
    """Something of a script's own: the inputs' sums, which also tell which samples came."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = list(state["sums"])


def _train(job: Job, folder: str, max_steps: int | None = None, num_samples: int = 60) -> tuple[str, list[float]]:
    """The fingerprint of the weights, and of what rank 0 of the run has seen since its beginning."""
    plan = Plan(
        world_size=worker_facts().world_size,
        algorithm="tree_exact" if job.parity == "bitwise" else "all_reduce",
        timeout_s=60,
    )
    with paceline.init(job, plan=plan, max_steps=max_steps, checkpoint_dir=folder) as run:
        train_set = images(num_samples, (3, 16, 16))
        model = models.build(job.model, num_classes=10, in_channels=3, image_size=16)
        model, _ = run.prepare(model, build_optimizer(job.optim, model))
        seen = _Seen()
        run.keep("seen", seen)
        for epoch in run.epochs():
            for batch in run.batches(train_set, epoch):
                total = torch.zeros(())
                if run.world_size == 1:
                    total = batch[0].double().sum()
                seen.sums.append(float(total))
                run.step(batch, loss_fn)
            run.evaluate(images(20, (3, 16, 16), augment=False), measure)
        return run.weights_sha256(), seen.sums


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    answer: tuple[str, list[float]] = run_ranks(_train, 1, _job(), str(tmp_path_factory.mktemp("undisturbed")))[0]
    return answer


_SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 2), (2, 3))]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 1), (1, 2), *_SLOW])
def test_resumes_bit_for_bit(tmp_path: Path, undisturbed: tuple[str, list[float]], before: int, after: int) -> None:
    sha, sums = undisturbed
    interrupted = run_ranks(_train, before, _job(), str(tmp_path), STOP)
    assert interrupted[0][0] != sha
    resumed = run_ranks(_train, after, _job(), str(tmp_path))
    assert {one[0] for one in resumed} == {sha}
    if before == after == 1:  # no sample twice, none left out
        assert resumed[0][1] == sums


@pytest.mark.slow
@pytest.mark.parametrize(("method", "overlap_steps"), [("local_sgd", 0), ("diloco", 0), ("diloco", 1)])
def test_resumes_at_a_meeting(tmp_path: Path, method: str, overlap_steps: int) -> None:
    job = _job(
        parity="numeric",
        aggregation={"method": method, "sync_every": 3, "overlap_steps": overlap_steps},
        optim={"name": "sgd", "lr": 0.05, "momentum": 0.9},
        checkpoint={"every_steps": 6},
        epochs=3,
    )
    whole = run_ranks(_train, 2, job, str(tmp_path / "whole"), 9)
    run_ranks(_train, 2, job, str(tmp_path / "cut"), STOP)  # in between two outer steps
    cut = run_ranks(_train, 2, job, str(tmp_path / "cut"), 9)
    assert cut[0][0] == whole[0][0]
    other = run_ranks(_train, 3, job, str(tmp_path / "cut"), 12)  # means of what two workers had
    assert len({one[0] for one in other}) == (3 if overlap_steps else 1)


class _OwnRate(torch.optim.SGD):
    """Finds its rate by its own steps and gradients, as Prodigy and schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.num_made = 0

    def step(self, closure: Any = None) -> Any:
        self.num_made += 1
        for group in self.param_groups:
            square = sum(float(p.grad.double().square().sum()) for p in group["params"] if p.grad is not None)
            group["largest"] = max(group.get("largest", 0.0), square)
            group["lr"] = 0.1 / (self.num_made + group["largest"])
        return super().step(closure)


def _train_alone(job: Job, folder: str, kind: str, max_steps: int | None = None) -> tuple[str, float]:
    """The last batch of an epoch has one sample, of one group of workers; the weights' fingerprint and the rate."""
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    with paceline.init(job, plan=plan, max_steps=max_steps, checkpoint_dir=folder) as run:
        model = models.build(job.model, num_classes=10, in_channels=3, image_size=16)
        optimizer: torch.optim.Optimizer
        if kind == "scheduler":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            model, optimizer = run.prepare(model, optimizer, scheduler=scheduler)
        else:
            model, optimizer = run.prepare(model, _OwnRate(model.parameters()))
        for batch in run.batches(images(61, (3, 16, 16))):
            run.step(batch, loss_fn)
        return run.weights_sha256(), float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("kind", "overlap_steps"), [("scheduler", 0), ("own rate", 0), ("own rate", 1)])
def test_each_group_keeps_its_own_rate(tmp_path: Path, kind: str, overlap_steps: int) -> None:
    aggregation = {"method": "local_sgd", "sync_every": 3, "groups": 2, "overlap_steps": overlap_steps}
    job = _job(parity="numeric", aggregation=aggregation, optim={"name": "sgd"}, checkpoint={"every_steps": 2})
    whole = run_ranks(_train_alone, 2, job, str(tmp_path / "whole"), kind)
    run_ranks(_train_alone, 2, job, str(tmp_path / "cut"), kind, 11)
    assert run_ranks(_train_alone, 2, job, str(tmp_path / "cut"), kind) == whole
    if kind == "scheduler":  # a group without samples counts the step too
        assert [rate for _, rate in whole] == pytest.approx([0.05 * 0.9**12] * 2)


def _lose_a_worker(job: Job, folder: str, dies_at: int, raises: bool) -> None:
    """The last worker dies, or meets a bug in the script, in the forward pass of a step."""
    plan = Plan(world_size=worker_facts().world_size, algorithm="tree_exact", timeout_s=60)
    with paceline.init(job, plan=plan, checkpoint_dir=folder) as run:
        model = models.build(job.model, num_classes=10, in_channels=3, image_size=16)
        model, _ = run.prepare(model, build_optimizer(job.optim, model))

        def fragile(model: nn.Module, batch: Any) -> Tensor:
            if run.steps == dies_at and run.rank == run.world_size - 1:
                if raises:
                    raise ValueError("a bug in the script")
                os._exit(1)
            return loss_fn(model, batch)

        for batch in run.batches(images(60, (3, 16, 16))):
            run.step(batch, fragile)


@pytest.mark.parametrize(("world_size", "raises"), [(1, True), (2, False), (3, False)])
def test_nothing_is_lost_with_a_worker(
    tmp_path: Path, undisturbed: tuple[str, list[float]], world_size: int, raises: bool
) -> None:
    """There is no checkpoint by the clock or by steps: those who are left save what they have."""
    job = _job(checkpoint={"every_epoch": False, "every_minutes": None})
    with pytest.raises(AssertionError, match=r"a bug in the script|died without a word|Connection|PeerLost|peer"):
        run_ranks(_lose_a_worker, world_size, job, str(tmp_path), STOP, raises)
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{STOP:08d}"]
    (resumed,) = run_ranks(_train, 1, job, str(tmp_path))
    assert resumed[0] == undisturbed[0]


def test_another_job_is_refused(tmp_path: Path) -> None:
    run_ranks(_train, 1, _job(), str(tmp_path), 2)
    with pytest.raises(AssertionError, match=r"JobError.*optim.lr was 0.01 and is 0.5"):
        run_ranks(_train, 1, _job(optim={"lr": 0.5}), str(tmp_path))
    with pytest.raises(AssertionError, match=r"DataError.*48 samples, but 60"):
        run_ranks(_train, 1, _job(), str(tmp_path), None, 48)


def _train_by_a_scheduler(job: Job, folder: str, killed_at: int | None = None, when: str = "") -> tuple[str, float]:
    """The fingerprint of the weights and the last learning rate; the scheduler steps after `run.step`, as in torch."""
    plan = Plan(world_size=worker_facts().world_size, algorithm="tree_exact", timeout_s=60)
    with paceline.init(job, plan=plan, checkpoint_dir=folder) as run:
        model = models.build(job.model, num_classes=10, in_channels=3, image_size=16)
        model, optimizer = run.prepare(model, build_optimizer(job.optim, model))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        run.keep("scheduler", scheduler)

        def killed(moment: str) -> None:
            if run.steps == killed_at and when == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        for batch in run.batches(images(60, (3, 16, 16))):
            killed("before step")
            run.step(batch, loss_fn)
            killed("before scheduler")
            scheduler.step()
            killed("after scheduler")
        return run.weights_sha256(), float(optimizer.param_groups[0]["lr"])


def test_all_that_is_kept_is_of_one_moment(tmp_path: Path) -> None:
    job = _job(checkpoint={"every_steps": 2, "every_minutes": None}, optim={"name": "adam", "lr": 0.01})
    (undisturbed,) = run_ranks(_train_by_a_scheduler, 1, job, str(tmp_path / "undisturbed"))
    assert undisturbed[1] == pytest.approx(0.01 * 0.8**STEPS)
    for world_size, when in ((1, "before step"), (2, "before scheduler"), (1, "after scheduler")):
        folder = tmp_path / when
        with pytest.raises(AssertionError, match=r"died without a word|Connection|peer"):
            run_ranks(_train_by_a_scheduler, world_size, job, str(folder), STOP, when)
        assert list(folder.glob("step-*"))
        (resumed,) = run_ranks(_train_by_a_scheduler, 1, job, str(folder))
        assert resumed == undisturbed


def _train_job(job: Job, folder: Path, max_steps: int | None = None) -> str:
    plan = Plan(world_size=worker_facts().world_size, algorithm="tree_exact", timeout_s=60)
    return train(job, plan, RunOutput(folder, None), max_steps).weights_sha256


def test_a_job_with_a_scheduler_resumes_bit_for_bit(tmp_path: Path) -> None:
    """One of transformers' and one of torch's, in steps and in epochs; groups of parameters without decay."""
    linear = {"name": "transformers:get_linear_schedule_with_warmup", "options": {"num_warmup_steps": 3}}
    decaying = {"name": "torch.optim.lr_scheduler:ExponentialLR", "options": {"gamma": 0.5}, "every": "epoch"}
    optim = {"name": "nadam", "lr": 0.01, "weight_decay": 0.1, "decay_norms_and_biases": False}
    for number, scheduler in enumerate((linear, decaying)):
        job = _job(
            global_batch_size=200,
            data={"name": "digits", "train_limit": 1000},
            optim={**optim, "scheduler": scheduler},
            checkpoint={"every_steps": 3},
        )
        (whole,) = run_ranks(_train_job, 1, job, tmp_path / f"whole{number}")
        run_ranks(_train_job, 2, job, tmp_path / f"cut{number}", STOP)
        (resumed,) = run_ranks(_train_job, 1, job, tmp_path / f"cut{number}")
        assert resumed == whole


def _train_with_average(job: Job, folder: str, max_steps: int | None = None) -> tuple[str, dict[str, float]]:
    """The fingerprint of the average, and its metrics."""
    plan = Plan(world_size=worker_facts().world_size, algorithm="tree_exact", timeout_s=60)
    with paceline.init(job, plan=plan, max_steps=max_steps, checkpoint_dir=folder) as run:
        model = models.build(job.model, num_classes=10, in_channels=3, image_size=16)
        run.prepare(model, build_optimizer(job.optim, model))
        average = run.average(0.8)
        for batch in run.batches(images(60, (3, 16, 16))):
            run.step(batch, loss_fn)
        test_set = images(20, (3, 16, 16), augment=False)
        metrics = run.evaluate(test_set, measure, model=average)
        assert metrics != run.evaluate(test_set, measure)
        return weights_sha256(average.module.state_dict()), metrics


def test_an_average_of_weights_is_evaluated_and_resumed(tmp_path: Path) -> None:
    (whole,) = run_ranks(_train_with_average, 1, _job(), str(tmp_path / "whole"))
    run_ranks(_train_with_average, 2, _job(), str(tmp_path / "cut"), STOP)
    (resumed,) = run_ranks(_train_with_average, 1, _job(), str(tmp_path / "cut"))
    assert resumed == whole


def _train_unfreezing(folder: str, max_steps: int | None = None) -> tuple[str, list[str]]:
    """Its first layer is frozen at first, and trained from the second epoch on."""
    job = _job(epochs=3)
    plan = Plan(world_size=worker_facts().world_size, algorithm="tree_exact", timeout_s=60)
    with paceline.init(job, plan=plan, max_steps=max_steps, checkpoint_dir=folder) as run:
        model = models.build(job.model, num_classes=10, in_channels=3, image_size=16)
        first = next(iter(model.parameters()))
        first.requires_grad_(False)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for epoch in run.epochs():
            if epoch == 1:
                first.requires_grad_(True)
            for batch in run.batches(images(60, (3, 16, 16)), epoch):
                run.step(batch, loss_fn)
        return run.weights_sha256(), run.notes


def test_what_is_frozen_is_resumed_too(tmp_path: Path) -> None:
    ((whole, _),) = run_ranks(_train_unfreezing, 1, str(tmp_path / "whole"))
    run_ranks(_train_unfreezing, 2, str(tmp_path / "parts"), 12)  # in the middle of the third epoch
    for sha, notes in run_ranks(_train_unfreezing, 3, str(tmp_path / "parts")):
        assert sha == whole
        assert any("is trained; to choose otherwise, set requires_grad after run.prepare" in note for note in notes)


def _train_with_teacher(folder: str, max_steps: int | None = None, fails_at: int | None = None) -> tuple[str, str]:
    """The fingerprints of a model and of its teacher, which follows it by the script's own hand."""
    job = _job(checkpoint={"every_epoch": False})
    plan = Plan(world_size=worker_facts().world_size, algorithm="tree_exact", timeout_s=60)
    with paceline.init(job, plan=plan, max_steps=max_steps, checkpoint_dir=folder) as run:
        model = models.build(job.model, num_classes=10, in_channels=3, image_size=16)
        teacher = run.prepare(copy.deepcopy(model), name="teacher")
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        teacher.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})

        def distilled(model: nn.Module, batch: Any) -> Tensor:
            with torch.no_grad():
                wanted = teacher(batch[0])
            return loss_fn(model, batch) + F.mse_loss(model(batch[0]), wanted)

        for batch in run.batches(images(60, (3, 16, 16))):
            run.step(batch, distilled)
            if run.steps == fails_at:
                raise ValueError("a bug in the script")
            for followed, follower in zip(model.parameters(), teacher.parameters(), strict=True):
                follower.data.lerp_(followed.data, 0.3)
        has_said = any("The frozen model 'teacher' has the weights" in note for note in run.notes)
        assert has_said == any(note.startswith("resumed at step") for note in run.notes)
        return run.weights_sha256(), weights_sha256(teacher.state_dict())


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_frozen_model_that_the_script_moves_is_resumed(tmp_path: Path, before: int, after: int) -> None:
    (whole,) = run_ranks(_train_with_teacher, 1, str(tmp_path / "whole"))
    run_ranks(_train_with_teacher, before, str(tmp_path / "parts"), 3)
    run_ranks(_train_with_teacher, after, str(tmp_path / "parts"), STOP)
    with pytest.raises(AssertionError, match="a bug in the script"):  # between the model's step and its teacher's
        run_ranks(_train_with_teacher, before, str(tmp_path / "parts"), None, STOP + 1)
    assert set(run_ranks(_train_with_teacher, after, str(tmp_path / "parts"))) == {whole}
