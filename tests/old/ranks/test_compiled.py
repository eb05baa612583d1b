"""Models from torch.compile train as they would without it, on any number of workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import JobError
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import in_turn, run_ranks


class _Net(nn.Module):
    """With a norm layer, whose statistics belong to virtual shards, and Python that no graph holds."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(dropout)
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        self.calls.append(int(hidden.detach().argmax()))  # a graph break
        output: Tensor = self.head(self.dropout(torch.tanh(self.second(hidden))))
        return output


class _Layers(nn.Sequential):
    """What any strategy can share out."""

    def __init__(self, _dropout: float) -> None:
        super().__init__(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))


class _LayersThatDraw(nn.Sequential):
    def __init__(self, dropout: float) -> None:
        super().__init__(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 5))


@dataclass(frozen=True)
class _Case:
    build: type[nn.Module] = _Net
    how: str = "eager"
    """By the "job" or "wrapped" by the script it is compiled to C++; "in place" to graphs of torch's own kernels."""
    strategy: str = "dp"
    dropout: float = 0.0
    values: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True)
class _Result:
    losses: tuple[float, ...] = ()
    accuracy: float = 0.0
    weights: dict[str, NDArray[Any]] = field(default_factory=dict)
    refusal: str = ""


def _samples() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(22, 12, generator=draw, dtype=torch.float64), torch.randint(0, 5, (22,), generator=draw)
    )


def _loss(model: nn.Module, batch: Any) -> paceline.Mean:
    """The mean over half of the samples: some virtual shards have none of these, and a loss that is not a number."""
    inputs, labels = batch
    counted = labels > 2
    losses = F.cross_entropy(model(inputs), labels, reduction="none")
    return paceline.Mean((losses * counted).sum() / counted.sum(), counted.sum())


def _hits(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double()}


def _train(case: _Case) -> _Result:
    world_size = worker_facts().world_size
    values = {"global_batch_size": 8, "virtual_shards": 4, "precision": "float64", "compile": case.how == "job"}
    plan = Plan(
        world_size=world_size,
        algorithm="tree_exact" if case.values.get("parity") == "bitwise" else "all_reduce",
        timeout_s=300,
        mesh=parse_mesh(case.strategy, world_size, 1) if world_size > 1 else None,
    )
    try:
        with paceline.init(Job.from_mapping(values | case.values), plan=plan) as run:
            model: Any = case.build(case.dropout)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if case.how == "wrapped":
                model = torch.compile(model)
            elif case.how == "in place":
                model.compile(backend="aot_eager")
            example = torch.zeros(2, 12, dtype=torch.float64) if run.mesh.pp > 1 else None
            run.prepare(model, optimizer, example=example)
            losses = tuple(float(run.step(batch, _loss)) for batch in run.batches(_samples()))
            accuracy = run.evaluate(_samples(), _hits)["accuracy"]
            weights = {name: value.detach().numpy().copy() for name, value in run.whole_state().items()}
    except JobError as refusal:
        return _Result(refusal=str(refusal))
    return _Result(losses, accuracy, weights)


def _train_all(cases: list[_Case]) -> list[_Result]:
    return in_turn(_train, [(case,) for case in cases])


def _assert_close(result: _Result, expected: _Result) -> None:
    assert not result.refusal
    np.testing.assert_allclose(result.losses, expected.losses, rtol=1e-12)
    assert result.accuracy == expected.accuracy
    for name, value in result.weights.items():  # where the model is spread, rank 0 alone has them
        np.testing.assert_allclose(value, expected.weights[name], rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_compiled_model_trains_as_it_would_without() -> None:
    alone = [_Case(), _Case(_Layers), _Case(dropout=0.5), _Case(how="in place", dropout=0.5)]
    alone.append(_Case(_LayersThatDraw, dropout=0.5))
    together = [
        _Case(how="job"),
        _Case(_Layers, "wrapped", "fsdp"),
        _Case(_Layers, "in place", "tp"),
        _Case(how="wrapped", dropout=0.5),
        _Case(_LayersThatDraw, "wrapped", "fsdp", dropout=0.5),
    ]
    eager, eager_layers, with_dropout, compiled, eager_draws = run_ranks(_train_all, 1, alone, timeout_s=400)[0]
    _assert_close(compiled, with_dropout)
    expected = [eager, eager_layers, eager_layers, with_dropout, eager_draws]
    first, *others = run_ranks(_train_all, 2, together, timeout_s=400)
    for case, result, wanted in zip(together, first, expected, strict=True):
        assert result.weights.keys() == wanted.weights.keys(), case
        _assert_close(result, wanted)
    for results in others:
        for result, wanted in zip(results, expected, strict=True):
            _assert_close(result, wanted)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_cannot_be_compiled_is_said() -> None:
    cases = [
        _Case(_Layers, how, "pp" if not parity else "dp", values=parity)
        for how in ("wrapped",)
        for parity in ({}, {"parity": "bitwise"})
    ]
    for results in run_ranks(_train_all, 2, cases, timeout_s=200):
        for case, result in zip(cases, results, strict=True):
            words = "The strategy pp" if case.strategy == "pp" else "parity = 'bitwise' cannot train"
            assert words in result.refusal
