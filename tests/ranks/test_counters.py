"""Models that count their forward passes, or lower a rate in each: a step counts once, on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan, parse_mesh
from tests.ranks.harness import run_ranks

DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(torch.randn(27, 6, generator=DRAW, dtype=torch.float64), torch.randint(3, (27,), generator=DRAW))
"""Three batches of 8 samples, and one of 3 that leaves the last worker without any."""


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.num_calls, self.rate, self.scale = 0, 1.0, 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        self.rate *= 0.9
        if self.num_calls % 4 == 0:
            self.scale *= 0.5
        out: Tensor = self.layers(inputs * self.rate) * min(1.0, self.num_calls / 10) * self.scale
        return out


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _measure(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}


def _train(
    parity: str, strategy: str = "dp", checkpoint_dir: str | None = None, max_steps: int | None = None
) -> tuple[list[float], int, str]:
    num_workers = worker_facts().world_size
    job = Job().with_values(
        global_batch_size=8, virtual_shards=4, epochs=2, eval_batch_size=4, precision="float64", parity=parity
    )
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    plan = Plan(world_size=num_workers, algorithm=algorithm, timeout_s=60, mesh=mesh)
    with paceline.init(job, plan=plan, checkpoint_dir=checkpoint_dir, max_steps=max_steps) as run:
        model = Annealed()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for batch in run.batches(DATA, sampler=lambda _seed, _epoch: range(27)):
            found.append(float(run.step(batch, _loss)))
            found.append(run.evaluate(DATA, _measure)["loss"])
        return found, model.num_calls, run.weights_sha256()


def _train_all(cases: list[tuple[str, str]]) -> list[tuple[list[float], int, str]]:
    return [_train(*case) for case in cases]


@pytest.mark.timeout(300)
def test_a_step_counts_once() -> None:
    (alone,) = run_ranks(_train_all, 1, [("numeric", "dp"), ("bitwise", "dp")])
    assert [num_calls for _, num_calls, _ in alone] == [8, 8]
    cases = [("numeric", "dp"), ("bitwise", "dp"), ("numeric", "fsdp"), ("bitwise", "fsdp")]
    for of_worker in run_ranks(_train_all, 3, cases, timeout_s=200):
        for number, (losses, num_calls, sha) in enumerate(of_worker):
            expected = alone[number % 2]
            assert num_calls == 8, cases[number]
            np.testing.assert_allclose(losses, expected[0], rtol=1e-12)
            if cases[number][0] == "bitwise":
                assert (losses, sha) == (expected[0], expected[2])


@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_a_resumed_run_counts_on(tmp_path: Path, strategy: str) -> None:
    ((whole, _, sha),) = run_ranks(_train, 1, "bitwise")
    run_ranks(_train, 2, "bitwise", strategy, str(tmp_path), 5)
    for losses, num_calls, found in run_ranks(_train, 3, "bitwise", strategy, str(tmp_path)):
        assert (losses, num_calls, found) == (whole[10:], 8, sha)


def _notes_of_asynchronous() -> list[str]:
    job = Job().with_values(
        global_batch_size=8, virtual_shards=4, precision="float64", aggregation={"method": "parameter_server_async"}
    )
    with paceline.init(job, max_steps=3, progress=False) as run:
        model = Annealed()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(DATA):
            run.step(batch, _loss)
        return run.notes


def test_asynchronous_workers_say_that_each_counts_for_itself() -> None:
    for notes in run_ranks(_notes_of_asynchronous, 2):
        assert any("change numbers in attributes (" in note for note in notes), notes
