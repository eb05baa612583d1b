"""Loss functions that compute gradients themselves, as gradient penalties do: the same on any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.errors import ModelError
from paceline.spec import Job, Plan
from tests.kit.workers import run_ranks

DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(torch.randn(27, 6, generator=DRAW, dtype=torch.float64), torch.randint(3, (27,), generator=DRAW))
"""Three batches of 8 samples, and one of 3 that leaves workers without any."""


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def penalty(model: nn.Module, batch: Any) -> Tensor:
    """The gradient penalty of WGAN-GP, and of physics-informed networks."""
    inputs = batch[0].clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    mean: Tensor = 0.1 * slope.square().sum(1).mean()
    return F.cross_entropy(outputs, batch[1]) + mean


def adversarial(model: nn.Module, batch: Any) -> Tensor:
    """Samples moved by the sign of their gradient."""
    inputs = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(inputs), batch[1], reduction="sum"), inputs)
    return F.cross_entropy(model((inputs + 0.1 * slope.sign()).detach()), batch[1])


LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {"penalty": penalty, "adversarial": adversarial}


def _train(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], parity: str
) -> tuple[list[float], dict[str, Any]]:
    job = Job().with_values(global_batch_size=8, virtual_shards=4, precision="float64", parity=parity)
    algorithm: Any = "tree_exact" if parity == "bitwise" else "all_reduce"
    plan = Plan(world_size=worker_facts().world_size, algorithm=algorithm, timeout_s=60)
    with paceline.init(job, plan=plan, max_steps=4) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = [float(run.step(batch, loss)) for batch in run.batches(DATA, sampler=lambda _seed, _epoch: range(27))]
        return losses, {name: value.detach().numpy().copy() for name, value in run.whole_state().items()}


def _train_all(parities: tuple[str, ...]) -> list[tuple[list[float], dict[str, Any]]]:
    return [_train(layers(), loss, parity) for parity in parities for loss in LOSSES.values()]


def _by_plain_torch(loss: Callable[[nn.Module, Any], Tensor], model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for start in range(0, 27, 8):
        optimizer.zero_grad()
        value = loss(model, DATA[start : start + 8])
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def _beside_plain_torch() -> list[tuple[list[float], list[float]]]:
    found = []
    for loss in LOSSES.values():
        model = layers().double()
        other = layers().double()
        other.load_state_dict(model.state_dict())
        found.append((_train(model, loss, "numeric")[0], _by_plain_torch(loss, other)))
    return found


@pytest.mark.timeout(300)
def test_losses_with_gradients_of_their_own() -> None:
    (beside,) = run_ranks(_beside_plain_torch, 1)
    for ours, theirs in beside:
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    parities = ("numeric", "bitwise")
    (alone,) = run_ranks(_train_all, 1, parities)
    for found in run_ranks(_train_all, 3, parities, timeout_s=200):
        for number, ((losses, weights), (expected, expected_weights)) in enumerate(zip(found, alone, strict=True)):
            rtol = 0 if number >= len(LOSSES) else 1e-12
            np.testing.assert_allclose(losses, expected, rtol=rtol)
            for name, value in weights.items():
                np.testing.assert_allclose(value, expected_weights[name], rtol=rtol, atol=rtol)


def _refusals_of_sharded_models() -> list[str]:
    found = []
    for strategy in ("fsdp", "zero1"):
        with paceline.init(global_batch_size=8, virtual_shards=4, strategy=strategy, progress=False) as run:
            model = layers().double()
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with pytest.raises(ModelError) as refusal:
                run.step(next(run.batches(DATA)), penalty)
            found.append(str(refusal.value))
    return found


def test_a_penalty_on_gradients_of_a_sharded_model_is_refused() -> None:
    for sentences in run_ranks(_refusals_of_sharded_models, 2):
        assert all(sentence.endswith("needs the strategy dp.") for sentence in sentences), sentences
