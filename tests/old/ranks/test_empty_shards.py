"""A shard of which a collate function has left nothing: the loss function does not call the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.env import worker_facts
from paceline.errors import ModelError
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

SAMPLES = [torch.full((4,), 1.0 + number, dtype=torch.float64) for number in range(16)]


def _first_of_two(seed: int, epoch: int) -> list[int]:
    return [*range(8, 16), *range(8)]


def _collate(samples: list[Tensor]) -> Tensor | None:
    """Leaves out every sample of the first and of the last shard of the second batch."""
    left = [one for one in samples if 2 < float(one[0]) < 7 or float(one[0]) > 8]
    return torch.stack(left) / 16 if left else None


def _loss(model: nn.Module, batch: Any) -> Any:
    if batch is None:
        return paceline.Mean(torch.zeros((), requires_grad=True), weight=0)
    return paceline.Mean((model(batch) - 1).square().mean(), weight=len(batch))


def _loss_of_all(model: nn.Module, batch: Any) -> Any:
    if batch is None:
        nothing: Any = 0 * sum(parameter.sum() for parameter in model.parameters())
        return paceline.Mean(nothing, weight=0)
    return _loss(model, batch)


def _train(is_of_all: bool, finds_unused: bool) -> list[float] | str:
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=60)
    try:
        with paceline.init(Job(global_batch_size=8, virtual_shards=4, precision="float64"), plan=plan) as run:
            model = nn.Linear(4, 1)
            model, _ = run.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), find_unused_parameters=finds_unused
            )
            loss_fn = _loss_of_all if is_of_all else _loss
            batches = run.batches(SAMPLES, collate_fn=_collate, sampler=_first_of_two)
            return [float(run.step(batch, loss_fn)) for batch in batches]
    except (ModelError, RuntimeError) as refusal:  # or that the other worker has left
        return str(refusal)


def _cases() -> dict[str, list[float] | str]:
    return {
        "all": _train(is_of_all=True, finds_unused=False),
        "found": _train(is_of_all=False, finds_unused=True),
        "plain": _train(is_of_all=False, finds_unused=False),
    }


def test_what_the_sentence_says_trains_on_any_number_of_workers() -> None:
    (one,) = run_ranks(_cases, 1)
    assert one["found"] == one["plain"] == one["all"] and len(one["all"]) == 2
    assert run_ranks(_train, 2, True, False) == [pytest.approx(one["all"])] * 2


@pytest.mark.parametrize(("finds_unused", "sentence"), [(False, "find_unused_parameters=True"), (True, "weight=0")])
def test_other_workers_wait_for_a_gradient(finds_unused: bool, sentence: str) -> None:
    refusals = run_ranks(_train, 2, False, finds_unused)
    assert any(sentence in str(one) for one in refusals)
