"""Training through every algorithm and wire format: one result where they are exact, a close one where not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline import env
from paceline.comm import ALGORITHMS, Aggregator, Bucket, Scheduler, open_links
from paceline.comm.selection import choose, sensible
from paceline.spec import Job, Plan
from paceline.train.loop import RunOutput
from paceline.train.loop import train as train_job
from paceline.train.process.process_group import join, leave
from tests.kit.workers import run_ranks
from tests.old.ranks.training import Outcome, images, largest_difference, loss_fn, train

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def _job(**values: Any) -> Job:
    return Job.from_mapping(
        {"global_batch_size": 12, "virtual_shards": 6, "epochs": 2, "model": "resnet20", "optim": {"lr": 0.01}} | values
    )


def _train(job: Job, algorithm: str, **plan: Any) -> Outcome:
    return train(job, images(30), algorithm=algorithm, timeout_s=30, **plan)


def test_every_exact_algorithm_trains_alike() -> None:
    """Gradients of channels_last convolutions are not contiguous; two micro-batches a step exercise no_sync."""
    job = _job(precision="float64", channels_last=True)
    (alone,) = run_ranks(_train, 1, job, "all_reduce")
    outcomes = run_ranks(_train_by_all, 3, job, timeout_s=100)
    for name in ALGORITHMS:
        first, *others = (by_name[name] for by_name in outcomes)
        assert largest_difference(alone, first) < 1e-9, name
        assert {other.sha for other in others} == {first.sha}, name
        assert first.losses == pytest.approx(alone.losses, rel=1e-9)


def _train_by_all(job: Job) -> dict[str, Outcome]:
    return {name: _train(job, name, num_servers=2, debug_comm=True) for name in ALGORITHMS}


WIRES = ["bfloat16", "float16"]


def test_every_lossy_wire_trains_all_workers_alike() -> None:
    job = _job()
    (alone,) = run_ranks(_train, 1, job, "all_reduce")
    for by_wire in zip(*run_ranks(_train_in_all, 3, job, timeout_s=100), strict=True):
        assert len({outcome.sha for outcome in by_wire}) == 1
        assert np.isfinite(by_wire[0].losses).all()
        assert by_wire[0].sha != alone.sha
        assert by_wire[0].losses[-1] == pytest.approx(alone.losses[-1], rel=0.2)


def _train_in_all(job: Job) -> list[Outcome]:
    return [_train(job.with_values(aggregation={"wire": wire}), "ring") for wire in WIRES]


def _sum_of_bf16() -> tuple[torch.Tensor, torch.Tensor]:
    """A bucket as DDP makes it of bfloat16 parameters, one of them not contiguous."""
    facts = env.worker_facts()
    world = join(facts, Plan(world_size=facts.world_size, timeout_s=20))
    assert world.group is not None
    aggregator = Aggregator(ALGORITHMS["ring"], open_links(world.group, CPU, 20), Scheduler(world.group, CPU))
    drawn = torch.randn(70, generator=torch.Generator().manual_seed(facts.rank)).bfloat16()
    values = drawn.clone()
    parts = (("conv", values[:60].as_strided((2, 3, 5, 2), (30, 1, 6, 3))), ("bias", values[60:]))
    aggregator.sum_bucket(Bucket(values, parts)).wait()
    aggregator.scheduler.raise_error()
    leave()
    return drawn.float(), values.float()


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    results = run_ranks(_sum_of_bf16, 3)
    exact = sum((drawn for drawn, _ in results), torch.zeros(70))
    for _, values in results:
        torch.testing.assert_close(values, exact.bfloat16().float(), rtol=0, atol=0)


def _choose() -> tuple[str, str, list[str], list[str]]:
    facts = env.worker_facts()
    world = join(facts, Plan(world_size=facts.world_size, timeout_s=20))
    assert world.group is not None
    links = open_links(world.group, CPU, 20)
    choice = choose(sensible(links), ALGORITHMS, links, [1 << 20, 4 << 20], budget_s=0.5)
    slow = {"all_reduce": _slow, "hierarchical": ALGORITHMS["hierarchical"]}
    other = choose(sensible(links), slow, links, [1 << 20], budget_s=0.5)
    spread = [str(c) for c in sensible(replace(links, nodes=((0, 1), (2,))))]
    leave()
    return choice.sentence(), other.chosen.algorithm, [str(c) for c in sensible(links)], spread


def _slow(values: torch.Tensor, links: Any) -> None:
    for _ in range(20):
        ALGORITHMS["all_reduce"](values, links)


def test_the_choice_is_measured_and_the_same_everywhere() -> None:
    answers = run_ranks(_choose, 3)
    assert len({sentence for sentence, *_ in answers}) == 1
    for sentence, other, on_one_node, on_two in answers:
        assert sentence.startswith("gradients are summed by ")
        assert " ms a step, against " in sentence
        assert other == "hierarchical"
        assert on_one_node == ["all_reduce", "hierarchical"]
        assert on_two == ["all_reduce", "hierarchical", "ring"]


def _lossy_record(tmp: str) -> tuple[str, str, tuple[str, ...]]:
    from pathlib import Path

    job = _job(model="lenet", data="digits", aggregation={"wire": "bfloat16"}, global_batch_size=64)
    record = train_job(job, None, RunOutput(Path(tmp), None), max_steps=3)
    return record.plan.algorithm, record.weights_sha256, record.notes


def test_the_summary_says_what_was_chosen_and_what_is_lost(tmp_path: Any) -> None:
    (algorithm, sha, notes), other = run_ranks(_lossy_record, 2, str(tmp_path))
    assert algorithm in ALGORITHMS
    assert other[1] == sha
    assert any("rounded to bfloat16" in note for note in notes)
    assert not any("summed by" in note for note in notes)  # one candidate on one node: nothing was measured


class _Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), *(nn.Linear(192, 192) for _ in range(6)), nn.Linear(192, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def _fails_in_backward() -> None:
    facts = env.worker_facts()
    plan = Plan(world_size=facts.world_size, algorithm="hierarchical", timeout_s=15)
    with paceline.init(global_batch_size=6, virtual_shards=3, plan=plan) as run:
        model = _Big()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(images(12)):
            if facts.rank == 1 and run.steps == 1:
                raise ZeroDivisionError("a mistake of one worker")
            run.step(batch, loss_fn)


def test_a_worker_that_fails_is_named_by_those_that_wait_for_it() -> None:
    with pytest.raises(AssertionError, match="a mistake of one worker"):
        run_ranks(_fails_in_backward, 3, timeout_s=40)
