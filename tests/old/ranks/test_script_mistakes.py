"""Mistakes of a script that would show late, or as something else: each is one sentence where it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import JobError, ModelError, PacelineError
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks

DRAW = torch.Generator().manual_seed(0)
SAMPLES = TensorDataset(torch.randn(24, 4, generator=DRAW), torch.randn(24, 1, generator=DRAW))
FEWER = TensorDataset(*SAMPLES[:10])


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _keep_a_number(run: paceline.Run) -> None:
    run.keep("best", 3)  # type: ignore[arg-type]


def _keep_two_of_one_name(run: paceline.Run) -> None:
    run.keep("state", torch.Generator())
    run.keep("state", torch.Generator())


def _measure_without_names(run: paceline.Run) -> None:
    run.evaluate(SAMPLES, lambda model, batch: _loss(model, batch))  # type: ignore[arg-type,return-value]


def _take_batches_of_two(run: paceline.Run, other: TensorDataset = FEWER) -> None:
    for batch, _ in zip(run.batches(SAMPLES), run.batches(other), strict=False):
        run.step(batch, _loss)


MISTAKES: dict[str, tuple[Callable[[paceline.Run], None], type[PacelineError], str]] = {
    "a number is kept": (
        _keep_a_number,
        JobError,
        r"run.keep\('best', …\) takes something with state_dict\(\).* not 3;",
    ),
    "two of one name are kept": (_keep_two_of_one_name, JobError, r"run.keep\('state', …\) was called before"),
    "metrics without names": (_measure_without_names, ModelError, "measure returned Tensor; it should return a dict"),
    "two data sets at a time": (_take_batches_of_two, JobError, "a run reads one data set at a time"),
    "two alike at a time": (lambda run: _take_batches_of_two(run, SAMPLES), JobError, "one data set at a time"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_one_sentence(mistake: str) -> None:
    make, kind, sentence = MISTAKES[mistake]
    with paceline.init(Job(global_batch_size=8, virtual_shards=2), progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(kind, match=sentence):
            make(run)


def test_an_iterator_that_is_left_does_not_stand_in_the_way_of_the_next() -> None:
    with paceline.init(Job(global_batch_size=8, virtual_shards=2), progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        first: Iterator[Any] = run.batches(SAMPLES)
        run.step(next(first), _loss)
        assert len([run.step(batch, _loss) for batch in run.batches(SAMPLES)]) == 3


def _unfreeze(folder: str, max_steps: int | None, *, has_all: bool, strategy: str = "dp") -> str:
    """The fingerprint of weights, of which some are given to the optimizer in the third step, or from the start."""
    num_workers = worker_facts().world_size
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    plan = Plan(world_size=num_workers, algorithm="all_reduce", timeout_s=60, mesh=mesh)
    job = Job(global_batch_size=8, virtual_shards=2, epochs=2, precision="float64").with_values(
        checkpoint={"every_steps": 4}
    )
    with paceline.init(job, plan=plan, checkpoint_dir=folder, max_steps=max_steps, progress=False) as run:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model[0].requires_grad_(has_all)
        added: dict[str, Any] = {"params": list(model[0].parameters()), "lr": 0.01}
        groups: list[dict[str, Any]] = [{"params": list(model[2].parameters())}, *([added] if has_all else [])]
        _, optimizer = run.prepare(model, torch.optim.AdamW(groups, lr=0.1))
        for batch in run.batches(SAMPLES):
            if run.steps == 2 and not has_all:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
            run.step(batch, _loss)
        return run.weights_sha256()


def test_groups_that_are_added_in_the_middle_are_saved(tmp_path: Path) -> None:
    place = str(tmp_path / "struck")
    whole = run_ranks(_unfreeze_added, 1, str(tmp_path / "whole"), None)
    run_ranks(_unfreeze_added, 1, place, 4)
    with pytest.raises(AssertionError, match=r"that were added during the run are given to it before run\.prepare"):
        run_ranks(_unfreeze_added, 1, place, None)
    assert run_ranks(_unfreeze_given, 1, place, None) == whole


def _unfreeze_added(folder: str, max_steps: int | None) -> str:
    return _unfreeze(folder, max_steps, has_all=False)


def _unfreeze_given(folder: str, max_steps: int | None) -> str:
    return _unfreeze(folder, max_steps, has_all=True)
