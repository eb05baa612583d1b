"""Local SGD and DiLoCo with a mean over tokens: workers count by their tokens, as in a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import paceline
from paceline.env import worker_facts
from paceline.spec import AggregationSpec, Job, Plan
from paceline.train import Run
from tests.kit.workers import run_ranks
from tests.old.ranks.test_losses import IGNORED, corpus, token_loss, token_model

Weights = dict[str, NDArray[Any]]
Batches = list[tuple[NDArray[Any], NDArray[Any]] | None]
"""The tokens and labels of each step of a worker; None where it has no sample."""

CASES: dict[str, dict[str, Any]] = {
    "local_sgd": {"method": "local_sgd", "sync_every": 2},
    "diloco": {"method": "diloco", "sync_every": 3, "outer_lr": 0.7, "outer_momentum": 0.9},
    "local_sgd of nodes": {"method": "local_sgd", "sync_every": 2, "sync_inside_nodes": True},
}
STEPS = 8


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


@dataclass(frozen=True)
class _Result:
    initial: Weights
    weights: Weights
    agreed: Weights
    """What workers agree on at the end, in the middle of two outer steps or not."""
    batches: Batches


def _train(aggregation: dict[str, Any]) -> _Result:
    values = {"global_batch_size": 8, "virtual_shards": 4, "epochs": 3, "precision": "float64"}
    job = Job.from_mapping(values | {"aggregation": aggregation})
    facts = worker_facts()
    plan = Plan(world_size=facts.world_size, algorithm="all_reduce", timeout_s=120)
    two_nodes = mock.patch("paceline.comm.links.node_identity", return_value=str(facts.rank // 2))
    batches: Batches = []
    with (
        two_nodes if aggregation.get("sync_inside_nodes") else nullcontext(),
        paceline.init(job, plan=plan, max_steps=STEPS) as run,
    ):
        run.say = lambda _sentence: None
        model = token_model()
        run.prepare(model, _optimizer(model))
        initial = _weights(run)
        for batch in run.batches(corpus()):
            assert run._pending is not None
            has_samples = sum(run._pending.batch.assignment.sizes)
            batches.append((batch[0].numpy(), batch[1].numpy()) if has_samples else None)
            run.step(batch, token_loss)
        weights = _weights(run)
        with run.consensus():
            return _Result(initial, weights, _weights(run), batches)


def _weights(run: Run) -> Weights:
    return {name: value.numpy().copy() for name, value in run.model.state_dict().items()}


def _train_all() -> list[_Result]:
    return [_train(aggregation) for aggregation in CASES.values()]


def _mean_loss(model: nn.Module, batches: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[Tensor, int]:
    tokens = torch.from_numpy(np.concatenate([tokens for tokens, _ in batches]))
    labels = torch.from_numpy(np.concatenate([labels for _, labels in batches]))
    losses = nn.functional.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none", ignore_index=IGNORED)
    num_tokens = int((labels != IGNORED).sum())
    return losses.sum() / max(1, num_tokens), num_tokens


def _plain_loop(
    spec: AggregationSpec, initial: Weights, groups: Sequence[Sequence[Batches]]
) -> tuple[Sequence[nn.Module], nn.Module]:
    """What the groups of workers have at the end, and the mean of it by their tokens since the last outer step."""
    models = [token_model().double() for _ in groups]
    agreed, outer = token_model().double(), token_model().double()
    for one in (*models, agreed, outer):
        one.load_state_dict({name: torch.from_numpy(value) for name, value in initial.items()})
    optimizers = [_optimizer(model) for model in models]
    is_diloco = spec.method == "diloco"
    lr, momentum = (spec.outer_lr, spec.outer_momentum) if is_diloco else (1.0, 0.0)
    outer_step = torch.optim.SGD(outer.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    tokens = [0] * len(groups)

    def mean() -> None:
        with torch.no_grad():
            for parts in zip(agreed.parameters(), *(model.parameters() for model in models), strict=True):
                parts[0].copy_(sum(n * part for n, part in zip(tokens, parts[1:], strict=True)) / sum(tokens))

    for step in range(STEPS):
        for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = [batches[step] for batches in groups[place]]
            loss, num_tokens = _mean_loss(model, [batch for batch in own if batch is not None] or [_nothing()])
            if num_tokens:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                tokens[place] += num_tokens
        mean()
        if (step + 1) % spec.sync_every == 0:
            for parameter, average in zip(outer.parameters(), agreed.parameters(), strict=True):
                parameter.grad = parameter.detach() - average.detach()
            outer_step.step()
            for model in models:
                model.load_state_dict(outer.state_dict())
            agreed.load_state_dict(outer.state_dict())
            tokens = [0] * len(groups)
    return models, agreed


def _nothing() -> tuple[NDArray[Any], NDArray[Any]]:
    return np.zeros((1, 6), np.int64), np.full((1, 6), IGNORED)


def _assert_close(weights: Weights, model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(weights[name], value.numpy(), rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_workers_count_by_their_tokens(world_size: int) -> None:
    results = run_ranks(_train_all, world_size, timeout_s=200)
    for number, (name, aggregation) in enumerate(CASES.items()):
        ranks = [result[number] for result in results]
        spec = AggregationSpec(**aggregation)
        groups = [[one.batches] for one in ranks]
        if spec.sync_inside_nodes:
            groups = [groups[0] + groups[1], *groups[2:]]
        models, agreed = _plain_loop(spec, ranks[0].initial, groups)
        assert any(batch is None or (batch[1] == IGNORED).all() for one in groups for b in one for batch in b), name
        for rank, one in enumerate(ranks):
            _assert_close(one.weights, models[rank // 2 if spec.sync_inside_nodes else rank])
            _assert_close(one.agreed, agreed)
