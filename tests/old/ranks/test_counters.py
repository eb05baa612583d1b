"""Models and loss functions that count their calls, or lower a rate in each: a step counts once, on any number of
workers."""

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
from tests.kit.workers import in_turn, run_ranks

DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(torch.randn(27, 6, generator=DRAW, dtype=torch.float64), torch.randint(3, (27,), generator=DRAW))
"""Three batches of 8 samples, and one of 3 that leaves the last worker without any."""


class _Schedule:
    rate = 1.0

    def next_rate(self) -> float:
        self.rate *= 0.9
        return self.rate


class Annealed(nn.Module):
    """Keeps numbers in attributes, one of which its class has at first, in an object and in a dictionary."""

    num_halved = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.num_calls, self.schedule, self.state = 0, _Schedule(), {"scale": 1.0}

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls % 4 == 0:
            self.state["scale"] *= 0.5
            self.num_halved += 1
        hidden = self.layers(inputs * self.schedule.next_rate())
        out: Tensor = hidden * min(1.0, self.num_calls / 10) * self.state["scale"] + self.num_halved / 8
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
    return in_turn(_train, cases)


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


class _Weighing(nn.Module):
    """A criterion of a script's own that lowers its weight from call to call, and keeps sums for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.sum_of_losses = 0, 0.0
        self.counts = {"calls": 0}

    def forward(self, outputs: Tensor, classes: Tensor) -> Tensor:
        self.num_calls += 1
        loss = F.cross_entropy(outputs, classes)
        self.sum_of_losses += float(loss.detach())
        return loss / self.num_calls


_num_calls = 0


def _raise_weight() -> float:
    global _num_calls
    _num_calls += 1
    return 0.1 * _num_calls


def _loss_functions() -> dict[str, tuple[Any, Any]]:
    """Loss functions that count in various places, and how to read the count."""
    criterion, counts, num_calls = _Weighing(), {"calls": 0}, 0

    def in_variable(model: nn.Module, batch: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return num_calls * _loss(model, batch)

    def in_dictionary(model: nn.Module, batch: Any) -> Tensor:
        counts["calls"] += 1
        return counts["calls"] * _loss(model, batch)

    def in_attribute(model: nn.Module, batch: Any) -> Tensor:
        in_attribute.calls += 1  # type: ignore[attr-defined]
        return in_attribute.calls * _loss(model, batch)  # type: ignore[attr-defined, no-any-return]

    in_attribute.calls = 0  # type: ignore[attr-defined]
    return {
        "criterion": (lambda model, batch: criterion(model(batch[0]), batch[1]), lambda: criterion.num_calls),
        "variable": (in_variable, lambda: num_calls),
        "dictionary": (in_dictionary, lambda: counts["calls"]),
        "attribute": (in_attribute, lambda: in_attribute.calls),  # type: ignore[attr-defined]
        "global": (lambda model, batch: _raise_weight() * _loss(model, batch), lambda: _num_calls),
        "sums": (lambda model, batch: criterion(model(batch[0]), batch[1]), lambda: criterion.sum_of_losses > 0),
    }


def _train_with(
    name: str, strategy: str, parity: str, checkpoint_dir: str | None = None, max_steps: int | None = None
) -> tuple[list[float], int]:
    global _num_calls
    _num_calls = 0
    loss_fn, count = _loss_functions()[name]
    num_workers = worker_facts().world_size
    job = Job().with_values(global_batch_size=8, virtual_shards=4, epochs=2, precision="float64", parity=parity)
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    plan = Plan(world_size=num_workers, algorithm=algorithm, timeout_s=60, mesh=mesh)
    with paceline.init(job, plan=plan, checkpoint_dir=checkpoint_dir, max_steps=max_steps) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.batches(DATA, sampler=lambda _seed, _epoch: range(27))
        return [float(run.step(batch, loss_fn)) for batch in batches], count()


def _train_with_all(strategies: list[tuple[str, str]]) -> list[tuple[list[float], int]]:
    return in_turn(_train_with, [(name, *strategy) for strategy in strategies for name in _loss_functions()])


@pytest.mark.timeout(300)
def test_a_step_counts_once_in_a_loss_function() -> None:
    names = list(_loss_functions())
    (alone,) = run_ranks(_train_with_all, 1, [("dp", "numeric")])
    for num_workers, strategies in (1, ["dp"]), (2, ["dp", "fsdp", "pp"]), (3, ["dp"]):
        cases = [(strategy, parity) for strategy in strategies for parity in ("numeric", "bitwise")]
        for rank, of_worker in enumerate(run_ranks(_train_with_all, num_workers, cases, timeout_s=200)):
            for number, (losses, count) in enumerate(of_worker):
                strategy, name = cases[number // len(names)], names[number % len(names)]
                expected_losses, expected = alone[number % len(names)]
                np.testing.assert_allclose(losses, expected_losses, rtol=1e-12, err_msg=f"{strategy} {name}")
                calls_it = strategy[0] != "pp" or rank == num_workers - 1
                assert count == expected == (1 if name == "sums" else 8) or not calls_it, (strategy, name)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["criterion", "variable"])
def test_a_loss_function_of_a_resumed_run_counts_on(tmp_path: Path, name: str) -> None:
    ((whole, _),) = run_ranks(_train_with, 1, name, "dp", "bitwise")
    run_ranks(_train_with, 2, name, "dp", "bitwise", str(tmp_path), 5)
    for losses, count in run_ranks(_train_with, 3, name, "dp", "bitwise", str(tmp_path)):
        assert (losses, count) == (whole[5:], 8)
