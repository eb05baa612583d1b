"""What a step leaves behind: nothing of one that failed, and no more memory than its results take."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.assignment import Assignment
from paceline.parallel.engine import Engine, StepInput
from paceline.parallel.engines.bitwise import BitwiseDataParallel
from paceline.parallel.engines.dp import DataParallel
from paceline.samples import Samples
from paceline.spec import Plan

CPU = torch.device("cpu")
NUM_SHARDS = 4


def _numeric(model: nn.Module) -> Engine:
    return DataParallel(model, Plan(), CPU, None, None, False)


def _bitwise(model: nn.Module) -> Engine:
    return BitwiseDataParallel(model, CPU, None, timeout_s=60)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def _loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def _step(loss: Callable[[nn.Module, Any], Tensor], seed: int) -> StepInput:
    draw = torch.Generator().manual_seed(seed)
    batch = torch.randn(8, 6, generator=draw, dtype=torch.float64) + seed, torch.arange(8) % 3
    assignment = Assignment.of(8, NUM_SHARDS, 0, 1)
    return StepInput(assignment, Samples.of(batch, 8), loss, lambda shard: shard, lambda value: value)


@pytest.mark.parametrize("build", [_numeric, _bitwise])
def test_norm_layers_count_nothing_of_a_step_that_failed(build: Callable[[nn.Module], Engine]) -> None:
    model = _model()
    other = copy.deepcopy(model)
    engine, never_failed = build(model), build(other)
    num_calls = 0

    def fails_in_second_pass(trained: nn.Module, batch: Any) -> Tensor:
        nonlocal num_calls
        loss = _loss(trained, batch)
        num_calls += 1
        if num_calls == 2:
            raise ArithmeticError("no second pass")
        return loss

    with pytest.raises(ArithmeticError, match="no second pass"):
        engine.gradients(_step(fails_in_second_pass, seed=50))
    with torch.no_grad():  # no shard is in the model any more
        assert copy.deepcopy(engine.module)(torch.randn(7, 6, dtype=torch.float64)).shape == (7, 3)
    for one in (engine, never_failed):
        one.module.zero_grad()
        one.buffers.start_over()
        one.buffers.begin_step()
        one.gradients(_step(_loss, seed=1))
    torch.testing.assert_close(list(engine.module.buffers()), list(never_failed.module.buffers()))


@pytest.mark.parametrize("build", [_numeric, _bitwise])
def test_a_step_that_fails_before_its_update_leaves_the_buffers_of_the_step_before(
    build: Callable[[nn.Module], Engine],
) -> None:
    engine = build(_model())
    engine.gradients(_step(_loss, seed=1))
    before = [buffer.clone() for buffer in engine.module.buffers()]
    engine.buffers.begin_step()
    engine.gradients(_step(_loss, seed=2))
    assert not any(map(torch.equal, before, engine.module.buffers()))
    for _ in range(2):  # once more changes nothing
        engine.buffers.start_over()
        assert all(map(torch.equal, before, engine.module.buffers()))


def test_a_loss_that_is_kept_keeps_no_gradients() -> None:
    engine = _bitwise(_model())
    result = engine.gradients(_step(_loss, seed=1))
    num_gradients = sum(parameter.numel() for parameter in engine.module.parameters())
    assert result.loss.untyped_storage().nbytes() < num_gradients * result.loss.element_size()


def test_gradients_lie_in_memory_as_their_parameters() -> None:
    conv, linear = nn.Conv2d(3, 4, (2, 1)), nn.Linear(4, 3)
    linear.weight = nn.Parameter(torch.randn(4, 6)[:, ::2].t())  # with gaps
    model = nn.Sequential(nn.Unflatten(1, (3, 2, 1)), conv, nn.Flatten(), linear).double()
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    _bitwise(model).gradients(_step(_loss, seed=1))
    assert conv.weight.grad is not None and conv.weight.grad.stride() == conv.weight.stride() == (6, 1, 3, 3)
    assert linear.weight.grad is not None and linear.weight.grad.stride() == (1, 3)
