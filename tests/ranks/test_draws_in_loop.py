"""A script that draws for a batch before `run.step` is told that these numbers depend on the number of workers.

One that mixes samples there is refused by several workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Mesh, Plan
from paceline.train.records.digest import weights_sha256
from tests.ranks.harness import run_ranks

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


def _in_place(batch: Any) -> Any:
    batch[0].add_(torch.randn_like(batch[0]))
    return batch


def _in_its_list(batch: Any) -> Any:
    batch[0] = batch[0] * torch.rand(len(batch[0]), 1)
    return batch


def _for_something_else(batch: Any) -> Any:
    torch.rand(1)
    return batch


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another tensor": lambda batch: [batch[0] + torch.randn_like(batch[0])],
    "in place": _in_place,
    "in its list": _in_its_list,
}
HARMLESS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda batch: batch,
    "without draws": lambda batch: [batch[0].double().float() * 2],
    "one number for all": lambda batch: [batch[0] * np.random.rand()],
    "draws for something else": _for_something_else,
}


def _collate(samples: list[tuple[Tensor]]) -> list[Tensor]:
    return [torch.stack([one for (one,) in samples])]


def _loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).square().mean()
    return loss


def _flipped(batch: Any) -> Any:
    """As timm's Mixup does it."""
    return [batch[0].mul_(0.7).add_(batch[0].flip(0).mul_(0.3))]


def _mixing(first_step: int, plan: Plan, max_steps: int = 4) -> tuple[list[str], int]:
    """The notes of a script that mixes samples from a step on, and how many steps it made."""
    plan = replace(plan, world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    job = Job(global_batch_size=8, virtual_shards=4, epochs=20)
    with paceline.init(job, plan=plan, max_steps=max_steps, progress=False) as run:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), example=INPUTS[:2])
        for batch in run.batches(TensorDataset(INPUTS)):
            run.step(_flipped(batch) if run.steps >= first_step else batch, _loss)
        return [note for note in run.notes if "of several samples" in note], run.steps


def test_samples_that_are_mixed_before_the_step_are_refused_by_several_workers() -> None:
    ((notes, steps),) = run_ranks(_mixing, 1, 0, Plan())
    assert len(notes) == 1 and "batch[0]" in notes[0] and steps == 4
    with pytest.raises(AssertionError, match=r"ModelError: .* makes batch\[0\] of several samples"):
        run_ranks(_mixing, 2, 0, Plan())


def test_so_are_those_of_a_mixup_that_begins_later() -> None:
    with pytest.raises(AssertionError, match=r"ModelError: .* of several samples"):
        run_ranks(_mixing, 2, 10, Plan(), 40)


def test_workers_that_all_have_the_whole_batch_mix_the_same() -> None:
    for notes, steps in run_ranks(_mixing, 2, 0, Plan(mesh=Mesh(pp=2))):
        assert len(notes) == 1 and steps == 4


def _taught(folder: str, max_steps: int) -> str:
    """The fingerprint of a model that learns from a teacher in inference mode, whose bits differ under a mode."""
    plan = Plan(world_size=1, algorithm="all_reduce")
    job = Job(global_batch_size=8, virtual_shards=4, epochs=2)
    teacher = nn.Parameter(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)))
    with paceline.init(job, plan=plan, max_steps=max_steps, checkpoint_dir=folder, progress=False) as run:
        model = nn.Linear(4, 1).double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for (batch,) in run.batches(TensorDataset(INPUTS)):
            with torch.inference_mode():
                sequences = (batch[:, None] * torch.arange(1.0, 7)[:, None]).transpose(0, 1)
                targets = nn.functional.linear(sequences, teacher).transpose(0, 1)
            given = (batch.double(), targets.flatten(1).double())
            run.step(given, lambda model, one: (model(one[0]) * one[1]).mean())
        return weights_sha256(model.state_dict())


def test_an_interrupted_run_computes_the_same_bits_with_its_batches(tmp_path: Path) -> None:
    run_ranks(_taught, 1, str(tmp_path / "interrupted"), 4)
    assert run_ranks(_taught, 1, str(tmp_path / "interrupted"), 6) == run_ranks(_taught, 1, str(tmp_path / "whole"), 6)


def _left_by_an_iterator_that_is_kept() -> bool:
    plan = Plan(world_size=1, algorithm="all_reduce")
    with paceline.init(Job(global_batch_size=8, virtual_shards=4), plan=plan, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batches = iter(run.batches(TensorDataset(INPUTS)))
        next(batches)
    return _get_current_dispatch_mode() is not None


def test_nothing_is_recorded_after_a_run_that_ends_before_its_iterator() -> None:
    assert run_ranks(_left_by_an_iterator_that_is_kept, 1) == [False]


def _notes(kind: str, collated: bool = False) -> list[str]:
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    with paceline.init(Job(global_batch_size=8, virtual_shards=4), plan=plan, max_steps=2, progress=False) as run:
        model = nn.Linear(4, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(TensorDataset(INPUTS), collate_fn=_collate if collated else None):
            change = (CHANGES | HARMLESS)[kind]
            run.step(batch.map(change) if collated else change(batch), _loss)
        return [note for note in run.notes if "draws from torch's generator" in note]


@pytest.mark.parametrize("kind", CHANGES)
def test_draws_for_a_batch_are_told_once(kind: str) -> None:
    for notes in (*run_ranks(_notes, 1, kind), *run_ranks(_notes, 2, kind)):
        assert len(notes) == 1


def test_so_are_those_for_each_shard() -> None:
    for notes in run_ranks(_notes, 2, "another tensor", True):
        assert len(notes) == 1


@pytest.mark.parametrize("kind", HARMLESS)
def test_nothing_else_is(kind: str) -> None:
    assert run_ranks(_notes, 2, kind) == [[], []]
