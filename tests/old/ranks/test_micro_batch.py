"""micro_batch_size = "auto": found under a limit on memory, halved on all workers alike; the rest stays the same."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.env import MEMORY_LIMIT, worker_facts
from paceline.errors import ModelError
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

STEPS = 4
SAMPLES = [(torch.randn(16, generator=torch.Generator().manual_seed(n)), n % 10) for n in range(240)]


class Hungry(nn.Module):
    """Keeps 3 MB of activations for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        wide = self.first(inputs).repeat(1, 2048)
        for _ in range(6):
            wide = wide.tanh()
        out: Tensor = self.second(wide.view(len(inputs), 2048, 64).mean(1))
        return out


class _Burden(torch.autograd.Function):
    """Runs out of memory in its backward pass when `is_too_much` says so."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, is_too_much: bool) -> Tensor:
        ctx.is_too_much = is_too_much
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.is_too_much:
            torch.empty(2**50)
        return gradients[0], None


class Burdened(nn.Module):
    """Memory runs out in the middle of backward, when the first buckets are on their way: more than a shard is too
    much for the last worker after the first steps."""

    def __init__(self, run: paceline.Run, first_steps: int) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 256), nn.Linear(256, 2048), nn.Linear(2048, 10)
        self.norm = nn.BatchNorm1d(256)
        self._is_last = lambda: run.rank == run.world_size - 1 and run.steps >= first_steps

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        hidden = _Burden.apply(hidden, self._is_last() and len(inputs) > 8)  # type: ignore[no-untyped-call]
        out: Tensor = self.third(self.second(hidden).relu())
        return out


@dataclass(frozen=True)
class Case:
    model: str
    micro_batch_size: int | str | None
    limit: str | None = None
    on_last_only: bool = False


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def _train(case: Case) -> tuple[str, list[float], Any, list[str]]:
    """Weights, losses, the plan's micro-batch at the end, and what was noted of it."""
    facts = worker_facts()
    os.environ.pop(MEMORY_LIMIT, None)
    if case.limit is not None and (not case.on_last_only or facts.rank == facts.world_size - 1):
        os.environ[MEMORY_LIMIT] = case.limit
    job = Job(global_batch_size=64, virtual_shards=8, epochs=2)
    plan = Plan(world_size=facts.world_size, algorithm="all_reduce", timeout_s=120)
    with paceline.init(job, plan=plan, max_steps=STEPS, micro_batch_size=case.micro_batch_size) as run:
        model: nn.Module = Hungry() if case.model == "hungry" else Burdened(run, 2 if case.model == "late" else 0)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        losses = [float(run.step(batch, _loss)) for batch in run.batches(SAMPLES)]
        notes = [note for note in run.notes if "micro_batch_size" in note]
        return run.weights_sha256(), losses, run.plan.micro_batch_size, notes


def _found_and_given(cases: list[Case]) -> list[tuple[Any, Any]]:
    """Each case, and the same with the micro-batch that was found given by hand, without any limit."""
    found = []
    for case in cases:
        automatic = _train(case)
        by_hand = _train(Case(case.model, automatic[2]))
        found.append((automatic, by_hand))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_found_under_a_limit_learns_what_the_same_number_by_hand_does(world_size: int) -> None:
    cases = [
        Case("hungry", "auto", "60MB"),
        Case("hungry", "auto", "60MB", on_last_only=True),
        Case("burdened", "auto"),
        Case("late", "auto"),
    ]
    results = run_ranks(_found_and_given, world_size, cases, timeout_s=250)
    for of_case in zip(*results, strict=True):
        for automatic, by_hand in of_case:
            assert automatic[2] == of_case[0][0][2]  # all workers agree
            if len(set(automatic[3])) == 1 and "step 1 on" in automatic[3][0]:
                assert automatic[:3] == by_hand[:3]
            assert automatic[1] == pytest.approx(by_hand[1], rel=1e-5)
            assert automatic[3] and not by_hand[3]
    sizes = [automatic[2] for automatic, _ in results[0]]
    assert set(sizes[:2]) <= {8, 16} and sizes[2:] == [8, 8]


def test_without_a_limit_nothing_is_found() -> None:
    ((_, losses, size, notes),) = run_ranks(_train, 1, Case("hungry", "auto"))
    assert (len(losses), size, notes) == (STEPS, "auto", [])


def _refusals(cases: list[Case]) -> list[str]:
    sentences = []
    for case in cases:
        with pytest.raises(ModelError) as refused:
            _train(case)
        sentences.append(str(refused.value))
    return sentences


def test_what_never_fits_is_one_sentence() -> None:
    cases = [Case("hungry", size, "15MB") for size in ("auto", None, 8)]
    (sentences,) = run_ranks(_refusals, 1, cases, timeout_s=100)
    advices = "raise virtual_shards", "set micro_batch_size = 'auto' or to 8", "raise virtual_shards"
    for sentence, advice in zip(sentences, advices, strict=True):
        assert sentence.startswith("Memory ran out ") and advice in sentence
    for of_worker in run_ranks(_refusals, 2, cases[:1], timeout_s=100):
        assert "raise virtual_shards" in of_worker[0]
