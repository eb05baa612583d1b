"""Buffers that forward passes change begin every pass as before the step, and are combined by a stated rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.parallel.assignment import Assignment
from paceline.parallel.batch_norm.norm import NormStatistics
from paceline.parallel.kept.forward_buffers import ForwardBuffers
from tests.zoo.of_torch import SpectralNorm

SIZES = (3, 2)


class Holder(nn.Module):
    """Holds buffers of several kinds, which `change` changes."""

    average: Tensor
    count: Tensor
    lowest: Tensor
    constant: Tensor

    def __init__(self, change: Callable[[Any, float], None]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("average", torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.tensor(7), persistent=False)
        self.register_buffer("lowest", torch.tensor([float("inf"), float("-inf")]))
        self.register_buffer("constant", torch.tensor([0.1, float("nan"), float("inf")]))
        self.inner = nn.Module()
        self.inner.register_buffer("shared", self.average)

    def forward(self, x: float) -> None:
        self.change(self, x)


def _step(model: nn.Module, buffers: ForwardBuffers, inputs: tuple[Any, ...] = (1.0, 2.0)) -> list[bool]:
    """A step of one worker with shards of 3 and 2 samples; returns which passes changed anything."""
    assignment = Assignment(SIZES, ((0, 2),), 0)
    buffers.begin_step()
    found = []
    for shard, value in enumerate(inputs):
        buffers.begin_pass()
        model(value)
        found.append(buffers.end_forward(assignment.shard_range(shard, 1)))
    (changed,) = buffers.changed(torch.zeros(()))
    buffers.combine(changed, buffers.moves, lambda _tensors: None)
    return found


def _lerp(holder: Any, x: float) -> None:
    holder.average.lerp_(torch.full((2,), x), 0.5)
    holder.count += int(x)


def _replace(holder: Any, x: float) -> None:
    """Other tensors in their places, under one of two names."""
    holder.average = holder.average * 0.5 + 0.5 * x
    holder.count = holder.count + int(x)


def _past_autograd(holder: Any, x: float) -> None:
    holder.average.data.lerp_(torch.full((2,), x), 0.5)
    holder.count.data += int(x)


@pytest.mark.parametrize("change", [_lerp, _replace, _past_autograd])
def test_the_mean_over_samples_and_the_first_shards_count(change: Callable[[Any, float], None]) -> None:
    model = Holder(change)
    average, constant = model.average, torch.clone(model.constant)
    buffers = ForwardBuffers(model, NormStatistics(model))
    mean = (3 * 1.0 + 2 * 2.0) / 5
    for number in range(1, 4):
        expected = 0.5 * model.average + 0.5 * mean
        assert _step(model, buffers) == [True, True]
        torch.testing.assert_close(model.average, expected)
        assert int(model.count) == 7 + number
        assert model.average is model.inner.shared is average  # whoever holds the tensor sees it
        assert buffers.newly_moving() == (["average", "count"] if number == 1 else [])
    torch.testing.assert_close(model.constant, constant, rtol=0, atol=0, equal_nan=True)
    assert list(buffers.hidden_state()) == ["count"]


def test_what_passes_leave_alone_keeps_its_bits() -> None:
    model = Holder(lambda _holder, _x: None)
    buffers = ForwardBuffers(model, NormStatistics(model))
    version = model.average._version
    assert _step(model, buffers) == [False, False]
    assert model.average._version == version
    assert buffers.newly_moving() == []


@pytest.mark.parametrize(("inputs", "mean"), [((1.0, 2.0), 1.4), ((0.0, 2.0), 0.8), ((0.0, 0.0), 0.0)])
def test_an_extreme_that_begins_at_infinity(inputs: tuple[float, float], mean: float) -> None:
    def observe(holder: Any, x: float) -> None:
        holder.lowest[0].clamp_(max=x)
        holder.lowest[1].clamp_(min=x)

    model = Holder(observe)
    buffers = ForwardBuffers(model, NormStatistics(model))
    _step(model, buffers, inputs)
    torch.testing.assert_close(model.lowest, torch.tensor([mean, mean]), atol=0, rtol=1e-6)


def test_a_step_that_overflows_changes_nothing() -> None:
    def overflow(holder: Any, x: float) -> None:
        holder.average.fill_(x)

    model = Holder(overflow)
    buffers = ForwardBuffers(model, NormStatistics(model))
    before = model.average.clone()
    _step(model, buffers, (1.0, float("nan")))
    assert torch.equal(model.average, before)
    _step(model, buffers, (1.0, 1.0))
    assert torch.equal(model.average, torch.ones(2))


def test_another_shape_is_refused() -> None:
    def grow(holder: Any, x: float) -> None:
        holder.average = torch.zeros(int(x) + 2)

    with pytest.raises(ModelError, match="gave the buffer 'average' another shape or type"):
        _step(model := Holder(grow), ForwardBuffers(model, NormStatistics(model)))


def test_spectral_norm_is_that_of_one_pass_over_the_batch() -> None:
    """All shards begin with the same vectors and the same weight, so all find what one pass finds, bit for bit."""
    torch.manual_seed(0)
    model, alone = SpectralNorm(), SpectralNorm()
    alone.load_state_dict(model.state_dict())
    buffers = ForwardBuffers(model, NormStatistics(model))
    images = torch.randn(5, 3, 8, 8)
    for _ in range(3):
        _step(model, buffers, (images[:3], images[3:]))
        alone(images)
    for (name, mine), theirs in zip(model.named_buffers(), alone.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


def test_an_evaluation_changes_nothing() -> None:
    model = Holder(_lerp)
    buffers = ForwardBuffers(model, NormStatistics(model))
    before: list[Tensor] = [buffer.clone() for buffer in model.buffers()]
    with buffers.untouched():
        model(3.0)
        buffers.begin_pass()
        assert int(model.count) == 7
        model(4.0)
    torch.testing.assert_close(list(model.buffers()), before, rtol=0, atol=0, equal_nan=True)


def test_an_evaluation_keeps_what_torchs_own_batch_norm_has_learned() -> None:
    """Its kernel moves running statistics without autograd's notice."""
    model = nn.BatchNorm1d(3)
    buffers = ForwardBuffers(model, NormStatistics(model))
    buffers.begin_step()
    model(torch.randn(8, 3) + 1)
    learned = [buffer.clone() for buffer in model.buffers()]
    with buffers.untouched():
        model(torch.randn(8, 3))
    assert all(map(torch.equal, learned, model.buffers()))
    assert not torch.equal(learned[0], torch.zeros(3))


def test_what_a_script_sets_between_steps_is_kept() -> None:
    model = Holder(_lerp)
    buffers = ForwardBuffers(model, NormStatistics(model))
    _step(model, buffers)
    model.average.fill_(100.0)
    model.count = torch.tensor(40)
    _step(model, buffers)
    torch.testing.assert_close(model.average, torch.full((2,), 50 + 0.7))
    assert int(model.count) == 41
