"""What a program does in the backward pass may compute over all samples of a pass, which the loss does not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from paceline.env import worker_facts
from paceline.spec import Job, Plan, parse_mesh
from tests.kit.workers import run_ranks

Loss = Callable[[nn.Module, Any], Tensor]
INPUTS = torch.randn(36, 4, generator=torch.Generator().manual_seed(0)).double()


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        normalised: Tensor = gradients[0] / gradients[0].norm()
        return normalised


def _normalised(_module: nn.Module, inside: Any, _outside: Any) -> tuple[Tensor]:
    return (inside[0] / inside[0].norm(),)


class _Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        if kind == "a module's hook":
            self.last.register_full_backward_hook(_normalised)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs).tanh()
        if self.kind == "a clamp beside reentrant checkpointing":
            hidden = checkpoint(torch.sin, hidden, use_reentrant=True)
        if self.kind == "a function":
            hidden = _Normalised.apply(hidden)  # type: ignore[no-untyped-call]
        elif (self.kind == "a hook" and self.training) or (self.kind == "a guarded hook" and hidden.requires_grad):
            hidden.register_hook(lambda gradient: gradient / gradient.norm())
        elif "clamp" in self.kind and self.training:
            hidden.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        elif self.kind == "a kept gradient" and self.training:
            hidden.retain_grad()
        logits: Tensor = self.last(hidden)
        return logits


def _scaled(model: nn.Module, batch: Any) -> Tensor:
    """Two terms, each divided by its own value."""
    outputs = model(batch[0])
    terms = outputs.square().mean(), (outputs - 1).abs().mean()
    ratio: Tensor = terms[0] / terms[0].detach() + terms[1] / terms[1].item()
    return ratio


def _policy(model: nn.Module, batch: Any) -> Tensor:
    """The first update of a policy, by advantages that are normalised over the batch, and a distance to a reference."""
    outputs, rewards = model(batch[0])[:, 0], batch[0][:, 0]
    advantages = (rewards - rewards.mean()) / rewards.std()
    gains = (outputs - outputs.detach()).exp() * advantages
    loss: Tensor = 0.1 * outputs.square().mean() - gains.mean()
    return loss


def _weighted(model: nn.Module, batch: Any) -> Tensor:
    """Samples weigh as much as the model says, relative to the others."""
    losses = model(batch[0]).square()
    with torch.no_grad():
        scale = losses.max()
    loss: Tensor = (losses / scale).mean() + losses.mean() - (losses.detach() / scale).mean()
    return loss


def _rounded(model: nn.Module, batch: Any) -> Tensor:
    """Straight through, sample by sample."""
    outputs = model(batch[0])
    loss: Tensor = (outputs + ((4 * outputs).round() / 4 - outputs).detach()).square().mean()
    return loss


def _squared(model: nn.Module, batch: Any) -> Tensor:
    squares: Tensor = model(batch[0]).square().mean()
    return squares


def _trained(kind: str, strategy: str = "dp", loss: Loss = _squared) -> tuple[list[float], list[str]]:
    """The losses of six steps, and the notes on backward passes and gradients."""
    num_workers = worker_facts().world_size
    mesh = parse_mesh(strategy, num_workers) if num_workers > 1 else None
    plan = Plan(world_size=num_workers, algorithm="all_reduce", timeout_s=60, mesh=mesh)
    job = Job(global_batch_size=12, virtual_shards=4, epochs=2, precision="float64")
    with paceline.init(job, plan=plan, progress=False) as run:
        model = _Net(kind)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = [float(run.step(batch, loss)) for batch in run.batches(TensorDataset(INPUTS))]
        return losses, [note for note in run.notes if "backward pass" in note or "gradient of several" in note]


@pytest.mark.parametrize("kind", ["a function", "a hook", "a guarded hook", "a module's hook"])
def test_what_computes_over_all_samples_of_a_pass_is_the_same_on_any_number_of_workers(kind: str) -> None:
    ((alone, notes),) = run_ranks(_trained, 1, kind)
    assert "not the sum of their own" in notes[0]
    strategies = ("dp", "fsdp") if kind == "a module's hook" else ("dp",)
    for losses, notes in (found for one in strategies for found in run_ranks(_trained, 2, kind, one)):
        np.testing.assert_allclose(losses, alone, rtol=1e-9)
        assert len(notes) == 1


def test_where_no_gradient_can_be_compared_shards_go_one_by_one() -> None:
    """As torch computes none of chosen parameters through a checkpoint that is reentrant."""
    ((alone, notes),) = run_ranks(_trained, 1, "a clamp beside reentrant checkpointing")
    assert "may compute over all samples" in notes[0]
    for losses, _ in run_ranks(_trained, 2, "a clamp beside reentrant checkpointing"):
        np.testing.assert_allclose(losses, alone, rtol=1e-9)


@pytest.mark.parametrize("kind", ["a hook that clamps", "a kept gradient"])
def test_what_computes_element_by_element_lets_shards_go_together(kind: str) -> None:
    ((alone, notes),) = run_ranks(_trained, 1, kind)
    assert not notes
    for losses, notes in run_ranks(_trained, 2, kind):
        np.testing.assert_allclose(losses, alone, rtol=1e-9)
        assert not notes


@pytest.mark.parametrize("loss", [_scaled, _policy, _weighted])
def test_constants_that_are_computed_over_all_samples_of_a_pass_change_nothing_on_several_workers(loss: Loss) -> None:
    ((alone, notes),) = run_ranks(_trained, 1, "plain", "dp", loss)
    assert "that the loss takes as a constant" in notes[0]
    strategies = ("dp",) if loss is _weighted else ("dp", "fsdp", "zero1")
    for losses, notes in (found for one in strategies for found in run_ranks(_trained, 2, "plain", one, loss)):
        np.testing.assert_allclose(losses, alone, rtol=1e-9)
        assert len(notes) == 1


def test_constants_of_single_samples_let_shards_go_together() -> None:
    ((alone, notes),) = run_ranks(_trained, 1, "plain", "dp", _rounded)
    assert not notes
    for losses, notes in (found for one in ("dp", "fsdp") for found in run_ranks(_trained, 2, "plain", one, _rounded)):
        np.testing.assert_allclose(losses, alone, rtol=1e-9)
        assert not notes
