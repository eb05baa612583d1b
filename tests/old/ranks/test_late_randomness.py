"""Models that begin to draw random numbers in the middle of a run: the same result on any number of workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks
from tests.old.ranks.training import images, loss_fn

Losses = list[float]
Weights = dict[str, np.ndarray[Any, Any]]
LATE = (0.0, 0.0, 0.5, 0.5, 0.3)
ON_AND_OFF = (0.0, 0.3, 0.0, 0.5, 0.0, 0.5)


class _Net(nn.Module):
    """`rate` is set between two steps; subclasses draw random numbers in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.first = nn.Linear(192, 16)
        self.second = nn.Linear(16, 10)
        self.rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.drop(torch.tanh(self.first(self.drop(self.norm(x).flatten(1))))))
        return output

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rate, self.training) if self.rate else x


class _Path(_Net):
    """Skips a layer for some samples (stochastic depth)."""

    def drop(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, dtype=x.dtype) > self.rate) if self.rate else x


class _FewSamples(_Net):
    """Draws only where it sees a bright sample: in some shards, on some workers."""

    def drop(self, x: Tensor) -> Tensor:
        return super().drop(x) if x.shape[1] == 192 and float(x.detach().amax()) > 2.1 else x


class _PythonAndNumPy(_Net):
    def drop(self, x: Tensor) -> Tensor:
        return x * (1 + random.random() * float(np.random.rand())) if self.rate else x


class _Checkpointed(_Net):
    def drop(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().drop, x, use_reentrant=False)
        return output


class _Reentrant(_Net):
    def drop(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().drop, x, use_reentrant=True) if x.requires_grad else super().drop(x)
        return output


class _Attention(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.attention.dropout = self.rate
        rows = self.norm(x).reshape(len(x), 8, 24)
        output: Tensor = self.second(self.first(self.attention(rows, rows, rows, need_weights=False)[0].flatten(1)))
        return output


class _Layers(nn.Sequential):
    """What any mesh can take apart."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 16),
            nn.Linear(16, 16), nn.Dropout(0.0), nn.ReLU(), nn.Linear(16, 10),
        )  # fmt: skip


@dataclass(frozen=True)
class _Case:
    build: Callable[[], nn.Module] = _Net
    rates: tuple[float, ...] = LATE
    values: tuple[tuple[str, Any], ...] = ()
    find_unused_parameters: bool = False


def _set_rate(model: nn.Module, rate: float) -> None:
    for layer in model.modules():
        if isinstance(layer, _Net):
            layer.rate = rate
        elif isinstance(layer, nn.Dropout):
            layer.p = rate


def _train(case: _Case, plan: dict[str, Any]) -> tuple[Losses, Weights, bool | None]:
    values = {"global_batch_size": 13, "virtual_shards": 6, "precision": "float64", "epochs": 9} | dict(case.values)
    job = Job().with_values(**values)
    defaults: dict[str, Any] = {"world_size": worker_facts().world_size, "algorithm": "all_reduce", "timeout_s": 30}
    spread = Plan(**defaults | plan)
    with paceline.init(job, plan=spread, max_steps=len(case.rates)) as run:
        model = case.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        example = torch.zeros(2, 3, 8, 8, dtype=torch.float64) if run.mesh.pp > 1 else None
        run.prepare(model, optimizer, find_unused_parameters=case.find_unused_parameters, example=example)
        losses = []
        for batch, rate in zip(run.batches(images(36)), case.rates, strict=True):
            _set_rate(run.model, rate)
            losses.append(float(run.step(batch, loss_fn)))
        weights = {name: value.detach().numpy().copy() for name, value in run.whole_state().items()}
        return losses, weights, run.engine.shared_state().get("draws_randomness")


def _assert_same(case: _Case, world_size: int, **plan: Any) -> None:
    ((losses, weights, _),) = run_ranks(_train, 1, case, {})
    for rank, (their_losses, theirs, _) in enumerate(run_ranks(_train, world_size, case, plan)):
        np.testing.assert_allclose(their_losses, losses, rtol=1e-12)
        for name, value in weights.items() if theirs or rank == 0 else ():
            np.testing.assert_allclose(theirs[name], value, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize(
    "build",
    [_Net, _Path, _FewSamples, _PythonAndNumPy, _Checkpointed, _Reentrant, _Attention],
    ids=lambda b: b.__name__,
)
@pytest.mark.parametrize("rates", [LATE, ON_AND_OFF], ids=["late", "on and off"])
def test_data_parallel(build: Callable[[], nn.Module], rates: tuple[float, ...]) -> None:
    for world_size in (2, 3):
        _assert_same(_Case(build, rates), world_size)


def test_the_step_in_which_it_begins_is_that_of_a_run_that_draws_from_the_start() -> None:
    """Both reference runs of the other tests are made by what they test; here nothing is ever computed together."""
    ((late, weights, draws),) = run_ranks(_train, 1, _Case(), {})
    ((by_shard, expected, _),) = run_ranks(
        _train, 1, _Case(values=(("parity", "bitwise"),)), {"algorithm": "tree_exact"}
    )
    assert draws is True
    np.testing.assert_allclose(late, by_shard, rtol=1e-12)
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_micro_batches_and_unused_parameters(find_unused_parameters: bool, micro_batch_size: int | None) -> None:
    case = _Case(_FewSamples, find_unused_parameters=find_unused_parameters)
    for world_size in (1, 2, 3):
        _assert_same(case, world_size, micro_batch_size=micro_batch_size)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "tp", "pp"])
@pytest.mark.parametrize("rates", [LATE, ON_AND_OFF], ids=["late", "on and off"])
def test_meshes_of_two(strategy: str, rates: tuple[float, ...]) -> None:
    _assert_same(_Case(_Layers, rates), 2, mesh=parse_mesh(strategy, 2))


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_some_samples_of_some_workers_on_a_mesh(strategy: str) -> None:
    mesh = parse_mesh("fsdp" if strategy == "zero3" else strategy, 3)
    _assert_same(_Case(_FewSamples), 3, mesh=mesh, micro_batch_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hsdp", "fsdp2 x tp2", "dp2 x pp2", "fsdp2 x pp2", "dp2 x tp2"])
def test_meshes_of_four(strategy: str) -> None:
    _assert_same(_Case(_Layers), 4, mesh=parse_mesh(strategy, 4))


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("build", [_Net, _FewSamples, _PythonAndNumPy], ids=lambda b: b.__name__)
def test_one_process(num_devices: int, build: Callable[[], nn.Module]) -> None:
    for rates in (LATE, ON_AND_OFF):
        _assert_same(_Case(build, rates), 1, devices_in_process=num_devices, mesh=None)


@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_outer_steps_after_every_step(method: str) -> None:
    """With an outer step after each one, of plain SGD, local SGD is synchronous training."""
    outer = {"method": method, "sync_every": 1} | (
        {"outer_lr": 1.0, "outer_momentum": 0.0} if method == "diloco" else {}
    )
    for world_size in (2, 3):
        ((_, alone, _),) = run_ranks(_train_plain, 1, {})
        for _, weights, _ in run_ranks(_train_plain, world_size, outer):
            for name, value in alone.items():
                np.testing.assert_allclose(weights[name], value, rtol=1e-11, atol=1e-12, err_msg=name)


def _train_plain(aggregation: dict[str, Any]) -> tuple[Losses, Weights, bool | None]:
    job = Job().with_values(global_batch_size=12, virtual_shards=6, precision="float64", aggregation=aggregation)
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=30)
    with paceline.init(job, plan=plan, max_steps=3) as run:
        model = _Layers()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for batch, rate in zip(run.batches(images(36)), (0.0, 0.0, 0.5), strict=True):
            _set_rate(run.model, rate)
            losses.append(float(run.step(batch, loss_fn)))
        return losses, {name: value.numpy().copy() for name, value in run.model.state_dict().items()}, None


def test_synchronised_norms_refuse_it_before_anything_is_updated() -> None:
    for world_size in (1, 2):
        assert run_ranks(_refused, world_size) == [True] * world_size


def _refused() -> bool:
    job = Job().with_values(global_batch_size=12, virtual_shards=6, norm="sync")
    plan = Plan(world_size=worker_facts().world_size, algorithm="all_reduce", timeout_s=30)
    with paceline.init(job, plan=plan) as run:
        model = _Net()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.batches(images(36))
        run.step(next(batches), loss_fn)
        _set_rate(run.model, 0.5)
        batch = next(batches)
        before = {name: value.clone() for name, value in run.model.state_dict().items()}
        with pytest.raises(paceline.errors.ModelError, match="draws random numbers"):
            run.step(batch, loss_fn)
        return all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
