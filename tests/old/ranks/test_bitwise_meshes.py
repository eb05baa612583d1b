"""`parity = "bitwise"` on meshes gives the bits of one worker, and checkpoints move between all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ModelError
from paceline.spec import Job, Mesh, PipelineSpec, Plan
from tests.kit.workers import run_ranks
from tests.old.ranks.bitwise_cases import CASES, HALF, STEPS, Outcome, can_be_cut, train

Found = TypeVar("Found")

ALL = tuple(CASES)
MESHES: dict[int, dict[str, Sequence[str]]] = {
    1: {"dp": ALL},
    2: {
        "dp2": ALL,
        "fsdp2": ALL,
        "zero1:2": ("lenet-adamw", "dropout", "resnet20"),
        "zero2:2": ("lenet", "unaligned", "gpt", "forks"),
        "pp2, 1f1b": [name for name in ALL if can_be_cut(name, "pp2, 1f1b")],
    },
    4: {
        "dp4": ALL,
        "fsdp4": ("unaligned", "gpt", "dropout"),
        "hsdp": ("lenet-adamw", "forks", "resnet20"),
        "fsdp2 x pp2, zero_bubble": ("lenet", "gpt", "unaligned"),
    },
}
"""By number of workers and strategy the cases that it is tried with: all of them by dp and fsdp2, and each by zero1 or
zero2 and by one of the meshes that shard among four workers."""
PIPELINES: dict[int, dict[str, Sequence[str]]] = {
    2: {
        "pp2, gpipe": ("lenet-adamw", "gpt"),
        "pp2, interleaved of 2": ("resnet20", "forks"),
        "pp2, zero_bubble": ("resnet20", "gpt"),
        "pp2, zero_bubble of 2": ("dropout", "forks"),
    },
    4: {
        "pp4, gpipe": ("resnet20", "forks"),
        "pp4, 1f1b": ("gpt", "lenet"),
        "pp4, zero_bubble": ("dropout", "forks"),
        "dp2 x pp2, interleaved of 2": ("resnet20", "gpt"),
    },
}
"""Likewise: each case with every schedule, or nearly so. `python -m benchmarks.bitwise_parity` tries all with all."""
RESUMED = CASES["dropout"]
MOVES = (
    *(("dp", strategy) for size in (2, 4) for strategy in MESHES[size]),
    *(("dp2", strategy) for strategy in MESHES[4]),
    *((strategy, "dp4") for strategy in MESHES[2] if strategy != "dp2"),
    ("fsdp2", "fsdp2 x pp2, zero_bubble"),
    ("zero1:2", "fsdp4"),
    ("zero2:2", "hsdp"),
    ("pp2, 1f1b", "fsdp4"),
)
"""Half trained by the first and from there by the second, which has more workers: every strategy saves a run that
another goes on with, and goes on with one, as do whole models, shards and stages."""
THERE_AND_BACK = ("pp2, 1f1b", "dp2", "fsdp2", "pp2, zero_bubble")
"""A step by each, in the folder of those before."""


def _some(world_size: int) -> dict[str, Sequence[str]]:
    return PIPELINES.get(world_size, {})


def _train_all(names: Sequence[str], strategy: str) -> list[Outcome]:
    return [train(CASES[name], strategy) for name in names]


def _alike(function: Callable[..., Found], world_size: int, *args: Any) -> Found:
    """What all ranks say; in processes of their own, because threads of all groups of a process wake often."""
    first, *rest = run_ranks(function, world_size, *args, timeout_s=300)
    assert all(one == first for one in rest)
    return cast(Found, first)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Outcome]:
    """Every case with its strategies; the runs that move to a strategy, to their end; and a run that moves often."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found: dict[tuple[str, str], Outcome] = {}
    size_of = {strategy: world_size for world_size, meshes in MESHES.items() for strategy in meshes}
    for world_size, meshes in MESHES.items():
        for strategy, names in (meshes | _some(world_size)).items():
            outcomes = _alike(_train_all, world_size, names, strategy)
            found |= {(name, strategy): one for name, one in zip(names, outcomes, strict=True)}
    for first, second in MOVES:
        there = folder / f"{first} to {second}"
        _alike(train, size_of[first], RESUMED, first, there, HALF)
        found[f"from {first}", second] = _alike(train, size_of[second], RESUMED, second, there)
    for stop, strategy in enumerate(THERE_AND_BACK, 1):
        found["there and back", strategy] = _alike(train, 2, RESUMED, strategy, folder / "there and back", stop)
    return found


def test_every_case_meets_every_way_to_share() -> None:
    for name in ALL:
        met = {strategy for strategies in MESHES.values() for strategy, names in strategies.items() if name in names}
        assert {"dp", "dp2", "fsdp2", "dp4"} < met
        assert len(met & {"fsdp4", "hsdp", "fsdp2 x pp2, zero_bubble"}) >= 1
    assert {first for first, _ in MOVES} == {strategy for size in (1, 2) for strategy in MESHES[size]}
    assert {second for _, second in MOVES} == {strategy for size in (2, 4) for strategy in MESHES[size]}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_every_mesh_gives_the_bits_of_one_worker(table: dict[tuple[str, str], Outcome], name: str) -> None:
    alone = table[name, "dp"]
    assert len(set(alone.losses)) == STEPS
    others = {
        strategy: outcome
        for (tried, strategy), outcome in table.items()
        if tried == name and strategy != "dp" and "tp" not in strategy
    }
    assert len(others) >= 5
    for strategy, outcome in others.items():
        assert outcome == alone, strategy


@pytest.mark.slow
def test_a_run_goes_on_under_any_mesh_without_a_bit_changed(table: dict[tuple[str, str], Outcome]) -> None:
    alone = next(table[name, "dp"] for name, case in CASES.items() if case is RESUMED)
    for number, strategy in enumerate(THERE_AND_BACK):
        assert table["there and back", strategy].losses == alone.losses[number : number + 1]
    assert replace(table["there and back", THERE_AND_BACK[-1]], losses=alone.losses) == alone
    resumed = {key: outcome for key, outcome in table.items() if key[0].startswith("from ")}
    assert len(resumed) == len(MOVES)
    for key, outcome in resumed.items():
        assert outcome == replace(alone, losses=alone.losses[HALF:]), key


# --- refused in a pipeline ---


class Partly(nn.Module):
    """The second stage makes two values, of which the loss takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.second, self.third = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, unused = self.first(x), self.aside(x)
        return self.second(kept), self.third(unused)


class Noise(nn.Module):
    """Adds a random number from another generator than torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return x + np.random.rand()


class Noisy(nn.Module):
    """Draws in its first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.noise, self.second = nn.Linear(4, 4), Noise(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.second(self.noise(self.first(x))),)


def _what_is_said(kind: type[nn.Module]) -> str:
    """The error that one step ends in; where another worker fails, that its connection is closed."""
    job = Job().with_values(parity="bitwise", global_batch_size=4, virtual_shards=2)
    plan = Plan(2, algorithm="tree_exact", timeout_s=60, mesh=Mesh(pp=2), pipeline=PipelineSpec(cuts=("second",)))
    with paceline.init(job, plan=plan, max_steps=1) as run:
        run.say = lambda _sentence: None
        model = kind()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), example=torch.ones(1, 4))
        try:
            for batch in run.batches(TensorDataset(torch.randn(4, 4))):
                run.step(batch, lambda model, batch: model(batch[0])[0].sum())
        except ModelError as error:
            return str(error)
        except Exception:
            return "another worker failed"
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Partly, "The loss does not depend on all that the stages before 'second' compute for it"),
        (Noisy, r"A layer before the last stage draws from Python's random or numpy\.random"),
    ],
)
def test_what_would_have_other_bits_is_refused(kind: type[nn.Module], sentence: str) -> None:
    said = run_ranks(_what_is_said, 2, kind, timeout_s=120)
    assert "nothing" not in said
    assert any(re.match(sentence, one) for one in said), said
