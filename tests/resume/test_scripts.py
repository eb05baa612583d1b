"""A run that was broken off goes on as if it had not been, with all that it and its script had; and nothing goes on
that is another run, that belongs to somebody else, or that was not whole."""

from __future__ import annotations

import functools
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint.format import Storage
from paceline.checkpoint.load import save_weights
from paceline.errors import PacelineError
from tests.kit.workers import run_ranks

NUM_SAMPLES, BATCH, EPOCHS = 24, 8, 3
STEPS = list(range(1, 10))


class _Layers(nn.Sequential):
    """Two layers, and a mean of the inputs that a state_dict leaves out."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Linear(4, 1))
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self[1](self[0](inputs - self.mean))
        if self.training:
            self.mean += 0.1 * (inputs.mean(0) - self.mean)
        return output


class _CountingSGD(torch.optim.SGD):
    """Lowers its rate with the steps that it counts in an attribute."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        self.param_groups[0]["lr"] = 0.1 / self.num_steps
        return super().step(closure)


class _FailingSGD(torch.optim.SGD):
    """Fails in its third step, when it has changed the weights."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        super().step(closure)
        if self.num_steps == 3:
            raise RuntimeError("in the middle of an update")


class _SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation: computes the gradient twice, and has an optimizer with momentum in it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=0.1)
        closure()
        for p, weights in zip(parameters, before, strict=True):
            p.copy_(weights)
        self.base.step()


AfterStep = Callable[[int], object]
AtEnd = Callable[[], object]
Script = Callable[[paceline.Run, nn.Module, torch.optim.Optimizer], tuple[AfterStep, AtEnd]]
"""After `run.prepare`: what a script does after each step, and what it has at the end."""


def _nothing(*_: object) -> tuple[AfterStep, AtEnd]:
    return lambda _step: None, lambda: None


def _average(run: paceline.Run, *_: object) -> tuple[AfterStep, AtEnd]:
    average = run.average(0.5)
    return lambda _step: None, lambda: [one.tolist() for one in average.module.parameters()]


def _freezing(_run: paceline.Run, model: nn.Module, *_: object) -> tuple[AfterStep, AtEnd]:
    first = next(model.parameters())
    return lambda step: first.requires_grad_(False) if step == 4 else None, first.tolist


def _moving_teacher(run: paceline.Run, model: nn.Module, *_: object) -> tuple[AfterStep, AtEnd]:
    torch.manual_seed(5)
    teacher = run.prepare(nn.Linear(3, 4), name="teacher")
    return lambda _step: teacher.weight.lerp_(next(model.parameters()).detach(), 0.5), teacher.weight.tolist


def _scheduling(run: paceline.Run, _model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[AfterStep, AtEnd]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run.keep("scheduler", scheduler)
    return lambda _step: scheduler.step(), scheduler.get_last_lr


def _rows(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(num_samples, 3, generator=draw), torch.randn(num_samples, 1, generator=draw))


def _train(
    folder: Path,
    script: Script = _nothing,
    optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    *,
    num_samples: int = NUM_SAMPLES,
    sampler: Any = None,
    max_steps: int | None = None,
    **job: Any,
) -> tuple[list[int], Any]:
    """The steps that were made, and what there is at the end, or the error that ended the run."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
        return loss

    made: list[int] = []
    values = {"global_batch_size": BATCH, "virtual_shards": 2, "epochs": EPOCHS} | job
    try:
        with paceline.init(checkpoint_dir=folder, max_steps=max_steps, progress=False, **values) as run:
            model = _Layers()
            _, optimizer = run.prepare(model, optimizer_of(model.parameters(), lr=0.1))
            after_step, at_end = script(run, model, optimizer)
            for batch in run.batches(_rows(num_samples), sampler=sampler):
                run.step(batch, loss_fn)
                made.append(run.steps)
                after_step(run.steps)
            return made, [run.weights_sha256(), model.mean.tolist(), at_end()]
    except (RuntimeError, PacelineError, SystemExit) as end:
        return made, f"{type(end).__name__}: {end}"


def _in_turn(folder: Path, *runs: dict[str, Any]) -> list[Any]:
    return [_train(folder, **one) for one in runs]


def _whole_and_in_two(folder: Path, first: dict[str, Any], then: dict[str, Any]) -> list[Any]:
    return [_train(folder / "whole", **then), *_in_turn(folder / "two", first, then)]


STATES: dict[str, dict[str, Any]] = {
    "an average of the weights": {"script": _average},
    "a layer that is frozen on the way": {"script": _freezing},
    "a teacher that moves": {"script": _moving_teacher},
    "a scheduler": {"script": _scheduling},
    "numbers of the optimizer": {"optimizer_of": _CountingSGD},
    "an optimizer in the optimizer": {"optimizer_of": _SAM},
}


@pytest.mark.parametrize("state", STATES)
def test_a_run_in_two_parts_is_the_run_in_one(state: str, tmp_path: Path) -> None:
    case = STATES[state]
    in_the_middle_of_an_epoch = case | {"max_steps": 5}
    ((whole, first, second),) = run_ranks(_whole_and_in_two, 1, tmp_path, in_the_middle_of_an_epoch, case)
    assert first[0] + second[0] == whole[0] == STEPS
    assert second[1] == whole[1]


def test_a_state_from_the_middle_of_an_update_is_not_saved(tmp_path: Path) -> None:
    ((whole, first, second),) = run_ranks(_whole_and_in_two, 1, tmp_path, {"optimizer_of": _FailingSGD}, {})
    assert first == ([1, 2], "RuntimeError: in the middle of an update")
    assert second[1] == whole[1]


def _forwards(_seed: int, _epoch: int) -> range:
    return range(NUM_SAMPLES)


def _backwards(_seed: int, _epoch: int) -> range:
    return range(NUM_SAMPLES)[::-1]


_MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
_COSINE = {"optim": {"schedule": "cosine"}}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "data of another size": ({}, {"num_samples": 32}, ("24", "32")),
    "another order of samples": ({"sampler": _forwards}, {"sampler": _backwards}, ("order",)),
    "more epochs of a schedule that ends with them": (_COSINE, _COSINE | {"epochs": 5}, ("epochs", "5")),
    "an optimizer of another kind": ({"optimizer_of": _MOMENTUM}, {"optimizer_of": torch.optim.Adam}, ("SGD", "Adam")),
}
"""What the first part of a run has, what the second has, and words of the refusal."""


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_does_not_go_on(name: str, tmp_path: Path) -> None:
    first, second, words = OTHERS[name]
    ((_, (made, said)),) = run_ranks(_in_turn, 1, tmp_path, first | {"max_steps": 4}, second)
    assert not made and all(word in said for word in words), said


def test_an_optimizer_of_another_kind_begins_anew_where_it_is_forced(tmp_path: Path) -> None:
    forced = {"optimizer_of": torch.optim.Adam, "force": True}
    ((_, (made, _)),) = run_ranks(_in_turn, 1, tmp_path, {"optimizer_of": _MOMENTUM, "max_steps": 4}, forced)
    assert made == STEPS[4:]


def _drawn_by_what_is_kept_before_prepare(folder: Path) -> list[float]:
    drawn = []
    for max_steps in (2, 4):
        job = paceline.Job(global_batch_size=BATCH, virtual_shards=2, epochs=EPOCHS)
        with paceline.init(job, checkpoint_dir=folder, max_steps=max_steps, progress=False) as run:
            draws = random.Random(3)
            run.keep("draws", draws)
            run.prepare(model := _Layers(), torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.batches(_rows()):
                run.step(batch, lambda model, shard: model(shard[0]).square().mean())
                drawn.append(draws.random())
    return drawn


def test_what_is_kept_before_prepare_goes_on_too(tmp_path: Path) -> None:
    draws = random.Random(3)
    assert run_ranks(_drawn_by_what_is_kept_before_prepare, 1, tmp_path) == [[draws.random() for _ in range(4)]]


def _rates_of_two_models(folder: Path) -> list[list[float]]:
    """In each step; their schedulers are made when both models are there."""
    rates = []
    for max_steps in (2, 4):
        job = paceline.Job(global_batch_size=BATCH, virtual_shards=2, epochs=EPOCHS)
        with paceline.init(job, checkpoint_dir=folder, max_steps=max_steps, progress=False) as run:
            models = [nn.Linear(3, 1), nn.Linear(3, 1)]
            optimizers = [torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)) for model in models]
            for model, optimizer in zip(models, optimizers, strict=True):
                run.prepare(model, optimizer)
            schedulers = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)) for one in optimizers]
            for number, scheduler in enumerate(schedulers):
                run.keep(f"scheduler {number}", scheduler)
            for batch in run.batches(_rows()):
                for model in models:
                    run.step(batch, lambda model, shard: model(shard[0]).square().mean(), model=model)
                rates.append([float(one.param_groups[0]["lr"]) for one in optimizers])
                for scheduler in schedulers:
                    scheduler.step()
    return rates


def test_schedulers_of_several_models_go_on_at_their_rates(tmp_path: Path) -> None:
    (rates,) = run_ranks(_rates_of_two_models, 1, tmp_path)
    assert [rate for rates_of_step in rates for rate in rates_of_step] == pytest.approx(
        [0.1 / (1 + step) for step in range(4) for _ in range(2)]
    )


def test_what_is_kept_after_a_step_leaves_the_rates_alone(tmp_path: Path) -> None:
    rates = []
    for max_steps in (1, 3):
        job = paceline.Job(global_batch_size=BATCH, virtual_shards=2, epochs=EPOCHS)
        with paceline.init(job, checkpoint_dir=tmp_path, max_steps=max_steps, progress=False) as run:
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.prepare(model, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
            for number, batch in enumerate(run.batches(_rows())):
                rates.append(float(optimizer.param_groups[0]["lr"]))
                run.step(batch, lambda model, shard: model(shard[0]).square().mean())
                if not number:
                    run.keep("draws", random.Random(0))
    assert rates == pytest.approx([0.1, 0.05, 0.025])


class _Counting(nn.Sequential):
    """Counts its steps in what torch calls extra state."""

    num_steps = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_steps = state["num_steps"]


def _counted(folder: Path, strategy: str) -> tuple[list[int], bool]:
    counts = []
    for max_steps in (2, 4):
        job = paceline.Job(global_batch_size=BATCH, virtual_shards=2, epochs=EPOCHS)
        with paceline.init(job, strategy=strategy, checkpoint_dir=folder, max_steps=max_steps, progress=False) as run:
            model = _Counting(nn.Linear(3, 1))
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.batches(_rows()):
                run.step(batch, lambda model, shard: model(shard[0]).square().mean())
                model.num_steps += 1
                counts.append(model.num_steps)
            whole = run.whole_state()
    save_weights(whole, Storage(folder), f"of-{run.rank}.safetensors")
    return counts, run.rank > 0 or whole["_extra_state"] == {"num_steps": 4}


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_extra_state_of_modules_goes_on(strategy: str, tmp_path: Path) -> None:
    assert run_ranks(_counted, 2, tmp_path, strategy) == [([1, 2, 3, 4], True)] * 2


def test_an_epoch_is_saved_at_its_end(tmp_path: Path) -> None:
    """Three steps each; the last one is saved at the end of the run."""
    run_ranks(functools.partial(_train, epochs=2), 2, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003", "step-00000006"]


def _without_manifests(folder: Path) -> str:
    _train(folder, max_steps=4)
    for file in folder.rglob("manifest.json"):
        file.unlink()
    return str(_train(folder)[1])


def test_a_run_whose_checkpoints_have_lost_their_manifests_does_not_begin_anew(tmp_path: Path) -> None:
    (said,) = run_ranks(_without_manifests, 1, tmp_path)
    assert "CheckpointError" in said and "manifest.json" in said, said


def _two_at_a_time(folder: Path) -> str:
    with paceline.init(checkpoint_dir=folder, progress=False) as run:
        run.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        return str(_train(folder)[1])


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    (said,) = run_ranks(_two_at_a_time, 1, tmp_path)
    assert str(tmp_path) in said and "in use" in said, said


def _train_where_all_may_read(folder: Path) -> None:
    os.umask(0o022)
    _train(folder)


def test_what_a_run_writes_is_its_owners_alone(tmp_path: Path) -> None:
    run_ranks(_train_where_all_may_read, 1, tmp_path / "run")
    written = list((tmp_path / "run").rglob("*"))
    assert written and not [path for path in written if stat.S_IMODE(path.stat().st_mode) & 0o077]
