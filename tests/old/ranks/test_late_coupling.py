"""Losses that begin to couple samples in the middle of a run: noticed in that very step, on any number of workers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
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
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import in_turn, run_ranks

WORDS, NUM_SAMPLES, BATCH = 17, 48, 8
IGNORED = -100
BEGINS = 4
"""The step before which nothing shows."""

LossOf = Callable[[nn.Module, Any, int], Tensor]


def _texts() -> tuple[Tensor, Tensor]:
    draw = np.random.default_rng(3)
    tokens = draw.integers(1, WORDS, (NUM_SAMPLES, 6))
    lengths = np.full(NUM_SAMPLES, 6)
    lengths[BATCH * BEGINS + 5 :] = draw.integers(1, 7, NUM_SAMPLES - BATCH * BEGINS - 5)  # in the last shards first
    is_padding = np.arange(6) >= lengths[:, None]
    tokens[is_padding] = 0
    return torch.from_numpy(tokens), torch.from_numpy(is_padding)


def _mean(model: nn.Module, tokens: Tensor, labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """What users write: a mean over valid tokens that is returned as if it were one over samples."""
    return F.cross_entropy(model(tokens).transpose(1, 2), labels, ignore_index=ignored)


def _by_labels(model: nn.Module, batch: Any, _step: int) -> Tensor:
    return _mean(model, batch["tokens"], batch["labels"])


def _by_mask(model: nn.Module, batch: Any, _step: int) -> Tensor:
    return _mean(model, batch["tokens"], batch["tokens"].masked_fill(batch["mask"] == 0, IGNORED))


def _by_token(model: nn.Module, batch: Any, _step: int) -> Tensor:
    return _mean(model, batch["tokens"], batch["tokens"], ignored=0)


def _by_weights(model: nn.Module, batch: Any, _step: int) -> Tensor:
    losses = F.cross_entropy(model(batch["tokens"]).transpose(1, 2), batch["tokens"], reduction="none")
    mean: Tensor = (losses * batch["weights"]).sum() / batch["weights"].sum()
    return mean


def _by_classes(model: nn.Module, batch: Any, _step: int) -> Tensor:
    """Each of the first shards has as many samples that count, by chance."""
    return _mean_over_counted(model, batch["tokens"], batch["classes"] > 0)


def _by_classes_in_arrays(model: nn.Module, batch: Any, _step: int) -> Tensor:
    return _mean_over_counted(model, batch["tokens"], torch.from_numpy(batch["classes"]) > 0)


def _by_classes_in_records(model: nn.Module, batch: Any, _step: int) -> Tensor:
    return _mean_over_counted(model, batch["tokens"], torch.tensor([len(one["boxes"]) > 0 for one in batch["classes"]]))


def _mean_over_counted(model: nn.Module, tokens: Tensor, is_counted: Tensor) -> Tensor:
    losses, counts = model(tokens).square().mean((1, 2)), is_counted.double()
    mean: Tensor = (losses * counts).sum() / counts.sum().clamp(min=1)
    return mean


def _spread(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A mean over samples, and a term that is none."""
    outputs = model(batch["tokens"]).mean((1, 2))
    return outputs.square().mean(), outputs.var(correction=0)


def _with_a_term_later(model: nn.Module, batch: Any, step: int) -> Tensor:
    mean, spread = _spread(model, batch)
    return mean if step < BEGINS else mean + spread


def _with_a_rate_that_rises(model: nn.Module, batch: Any, step: int) -> Tensor:
    mean, spread = _spread(model, batch)
    return mean + (0.0 if step < BEGINS else 0.5) * spread


_FIRST: list[nn.Module] = []
"""The model as it was before the first step."""


def _away_from_the_first(model: nn.Module, batch: Any, _step: int) -> Tensor:
    """As a model that is fine-tuned is held near its reference, from which it does not differ in the first step."""
    outputs = model(batch["tokens"]).mean((1, 2))
    away = (outputs - _FIRST[0](batch["tokens"]).mean((1, 2))).mean()
    loss: Tensor = outputs.square().mean() + away.square()
    return loss


LOSSES: dict[str, tuple[LossOf, tuple[str, ...]]] = {
    "labels": (_by_labels, ("tokens", "labels")),
    "mask": (_by_mask, ("tokens", "mask")),
    "token": (_by_token, ("tokens",)),
    "weights": (_by_weights, ("tokens", "weights")),
    "classes": (_by_classes, ("tokens", "classes")),
    "arrays": (_by_classes_in_arrays, ("tokens", "classes")),
    "records": (_by_classes_in_records, ("tokens", "classes")),
    "term": (_with_a_term_later, ("tokens",)),
    "rate": (_with_a_rate_that_rises, ("tokens",)),
    "reference": (_away_from_the_first, ("tokens",)),
}


CLASSES_AS: dict[str, Callable[[Tensor], Any]] = {
    "arrays": Tensor.numpy,
    "records": lambda classes: [{"boxes": torch.ones(int(number), 4)} for number in classes],
}


class _Named(TensorDataset):
    def __init__(self, names: tuple[str, ...]) -> None:
        (tokens, is_padding), numbers = _texts(), torch.arange(NUM_SAMPLES)
        found = {
            "tokens": torch.where(is_padding, 3, tokens) if {"weights", "mask", "classes"} & {*names} else tokens,
            "labels": tokens.masked_fill(is_padding, IGNORED),
            "mask": (~is_padding).long(),
            "weights": (~is_padding).double(),
            "classes": torch.where(numbers < BATCH * BEGINS, numbers % 2, is_padding.any(1).long()),
        }
        super().__init__(*(found[name] for name in names))
        self._names = names

    def __getitem__(self, number: Any) -> Any:
        return {name: tensor[number] for name, tensor in zip(self._names, self.tensors, strict=True)}


@dataclass(frozen=True)
class _Result:
    losses: list[float]
    weights: dict[str, NDArray[Any]]
    notes: list[str]


def _train(name: str, strategy: str, values: dict[str, Any]) -> _Result:
    world_size = worker_facts().world_size
    loss_of, names = LOSSES[name]
    settings = {"global_batch_size": BATCH, "virtual_shards": 4, "precision": "float64", "optim": {"clip_norm": 1.0}}
    job = Job.from_mapping(settings | values)
    plan = Plan(
        world_size=world_size,
        algorithm="all_reduce",
        timeout_s=120,
        mesh=parse_mesh(strategy, world_size, 1) if world_size > 1 else None,
        devices_in_process=2 if strategy == "dp_one_process" else 1,
    )
    with paceline.init(job, plan=plan) as run:
        run.say = lambda _sentence: None
        model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, WORDS))
        _FIRST[:] = [copy.deepcopy(model).double().requires_grad_(False)]
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            return loss_of(model, batch, run.steps)

        def content(batch: dict[str, Tensor]) -> dict[str, Any]:
            return batch | {"classes": CLASSES_AS[name](batch["classes"])} if name in CLASSES_AS else batch

        batches = run.batches(_Named(names), sampler=lambda _seed, _epoch: range(NUM_SAMPLES))
        losses = [float(run.step(content(batch), loss_fn)) for batch in batches]
        weights = {key: value.detach().numpy().copy() for key, value in run.whole_state().items()}
        return _Result(losses, weights, run.notes)


def _train_all(strategies: tuple[str, ...], values: dict[str, Any]) -> list[_Result]:
    return in_turn(_train, [(name, strategy, values) for strategy in strategies for name in LOSSES])


@pytest.fixture(scope="module")
def shard_by_shard() -> list[_Result]:
    results: list[_Result] = run_ranks(_train_all, 1, ("dp",), {"shard_by_shard": True}, timeout_s=120)[0]
    return results


@pytest.mark.parametrize(
    ("world_size", "strategies"), [(1, ("dp", "dp_one_process")), (2, ("dp", "fsdp", "zero1")), (3, ("dp", "fsdp"))]
)
def test_what_begins_later_is_noticed_in_that_step(
    shard_by_shard: list[_Result], world_size: int, strategies: tuple[str, ...]
) -> None:
    for rank, results in enumerate(run_ranks(_train_all, world_size, strategies, {}, timeout_s=200)):
        places = [(strategy, name) for strategy in strategies for name in LOSSES]
        for number, (place, result) in enumerate(zip(places, results, strict=True)):
            expected = shard_by_shard[number % len(LOSSES)]
            np.testing.assert_allclose(result.losses, expected.losses, rtol=1e-12, err_msg=str(place))
            for name, value in result.weights.items():
                wanted = expected.weights[name]
                np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-13, err_msg=f"{place} {name}")
            found = [note for note in result.notes if "goes through the model alone" in note]
            assert len(found) == 1 or rank, (place, result.notes)


def _ratios(model: nn.Module, batch: Any) -> Tensor:
    """PPO with advantages that are normalised over the batch: its term is zero until the weights have moved."""
    inputs, old, advantages = batch
    advantages = (advantages - advantages.mean()) / advantages.std()
    values = model(inputs).squeeze(1)
    loss: Tensor = 0.1 * (values - inputs[:, 0]).square().mean() - ((values - old).exp() * advantages).mean()
    return loss


def _first_update(strategy: str) -> tuple[list[float], list[str]]:
    num_workers = worker_facts().world_size
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    plan = Plan(world_size=num_workers, algorithm="all_reduce", timeout_s=60, mesh=mesh)
    job = Job().with_values(global_batch_size=16, virtual_shards=4, precision="float64")
    with paceline.init(job, plan=plan, max_steps=2) as run:
        model = nn.Linear(5, 1)
        draw = torch.Generator().manual_seed(0)
        inputs, advantages = (torch.randn(32, n, generator=draw, dtype=torch.float64) for n in (5, 1))
        old = model.double()(inputs).detach()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = [
            float(run.step(batch, _ratios)) for batch in run.batches(TensorDataset(inputs, old[:, 0], advantages[:, 0]))
        ]
        return [*losses, *run.whole_state().get("weight", torch.zeros(0)).flatten().tolist()], list(run.notes)


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "tp"])
def test_a_loss_whose_first_value_hides_what_its_gradient_does(strategy: str) -> None:
    ((alone, notes),) = run_ranks(_first_update, 1, "dp")
    assert any("is not the mean of their own losses" in note for note in notes)
    (shared, _), *_ = run_ranks(_first_update, 2, strategy)
    assert shared == pytest.approx(alone, rel=1e-9, abs=1e-12)
