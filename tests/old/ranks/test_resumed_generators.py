"""A run resumed in the middle of an epoch has not gone through what drew from a script's own generators before, or what
its optimizer counted: it ends as one that was not interrupted, on another number of workers too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Sampler, TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import DataError
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

DRAW = torch.Generator().manual_seed(5)
INPUTS = torch.randn(28, 4, generator=DRAW, dtype=torch.float64)
TARGETS = INPUTS.sum(1).sin()
SET = TensorDataset(INPUTS, TARGETS)
STOP = 6
"""Four batches of 8 samples an epoch: in the middle of the second."""


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1).double()
        self.rng = np.random.default_rng(1)

    def forward(self, inputs: Tensor) -> Tensor:
        noise = torch.from_numpy(self.rng.normal(size=len(inputs)))
        out: Tensor = self.layer(inputs).squeeze(-1) + 0.1 * noise
        return out


class Langevin(torch.optim.SGD):
    """Adds noise from a generator of its own to every update, ever less by a count and a rate in attributes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.rng = torch.Generator().manual_seed(3)
        self.num_steps, self.rate = 0, torch.ones(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.num_steps += 1
        self.rate *= 0.9
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.randn(parameter.shape, generator=self.rng, dtype=parameter.dtype)
                parameter += 0.1 * self.rate / self.num_steps * noise


class Buckets(Sampler[list[int]]):
    """Batches in an order that a generator of Python's shuffles."""

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __iter__(self) -> Iterator[list[int]]:
        numbers = list(range(28))
        self.rng.shuffle(numbers)
        return iter([numbers[start : start + 8] for start in range(0, 28, 8)])


class Shuffled(IterableDataset[Any]):
    """A stream in an order by its own generator, which its shards share."""

    def __init__(self, rows: range = range(28), rng: random.Random | None = None) -> None:
        self.rows, self.rng = rows, rng or random.Random(5)

    def __iter__(self) -> Iterator[Any]:
        order = list(self.rows)
        self.rng.shuffle(order)
        for row in order:
            yield INPUTS[row] + 0.1 * self.rng.random(), TARGETS[row]


class Split(Shuffled):
    num_shards = 4

    def shard(self, num_shards: int, index: int) -> Split:
        return Split(range(index, 28, num_shards), self.rng)


class Counting(IterableDataset[Any]):
    """A stream whose order depends on how often it was read before."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_read += 1
        for row in torch.randperm(28, generator=torch.Generator().manual_seed(self.num_read)).tolist():
            yield INPUTS[row], TARGETS[row]


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"error": (model(batch[0]) - batch[1]).abs()}


def _train(kind: str, folder: str, max_steps: int | None = None) -> tuple[list[float], str]:
    """The losses, and errors of evaluations after every step, and the fingerprint of the weights."""
    num_workers = worker_facts().world_size
    job = Job().with_values(global_batch_size=8, virtual_shards=4, epochs=3, eval_batch_size=3, parity="bitwise")
    plan = Plan(world_size=num_workers, algorithm="tree_exact", timeout_s=60)
    data: Any = {"stream": Shuffled, "split stream": Split, "counting stream": Counting}.get(kind, lambda: SET)()
    with paceline.init(job, plan=plan, checkpoint_dir=f"{folder}/{kind}", max_steps=max_steps) as run:
        model = Noisy()
        optimizer = Langevin(model.parameters()) if kind == "optimizer" else torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        found = []
        for batch in run.batches(data, sampler=Buckets() if kind == "sampler" else None):
            found.append(float(run.step(batch, _loss)))
            found.append(run.evaluate(SET, _measure)["error"])
        return found, run.weights_sha256()


def _train_all(kinds: list[str], folder: str, max_steps: int | None = None) -> list[tuple[list[float], str]]:
    return [_train(kind, folder, max_steps) for kind in kinds]


@pytest.mark.timeout(200)
def test_own_generators_and_counts_go_on_where_a_run_is_resumed(tmp_path: Path) -> None:
    kinds = ["optimizer", "sampler", "stream", "split stream"]
    (alone,) = run_ranks(_train_all, 1, kinds, str(tmp_path / "whole"))
    run_ranks(_train_all, 2, kinds, str(tmp_path / "parts"), STOP)
    for of_worker in run_ranks(_train_all, 3, kinds, str(tmp_path / "parts")):
        for kind, (losses, sha), whole in zip(kinds, of_worker, alone, strict=True):
            assert (losses, sha) == (whole[0][2 * STOP :], whole[1]), kind


def _is_refused(folder: str) -> str:
    with pytest.raises(DataError) as refusal:
        _train("counting stream", folder)
    return str(refusal.value)


def test_a_stream_that_gives_other_samples_is_refused(tmp_path: Path) -> None:
    run_ranks(_train, 1, "counting stream", str(tmp_path), STOP)
    for sentence in run_ranks(_is_refused, 2, str(tmp_path)):
        assert "The first 16 samples of the stream are others than when this run was saved" in sentence
