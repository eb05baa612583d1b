"""Which updates torch's fused kernels may leave out by themselves, and that these leave nothing behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from paceline.train.optimizers.joint_optimizer import JointOptimizer
from paceline.train.steps.device_skip import left_out_where, skips_on_device, tell_scaler

BAD, GOOD = torch.ones(()), torch.zeros(())


class _OnesOwn(SGD):
    """May look at `found_inf` or not."""


def _model() -> nn.Module:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    return model


def _state(model: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


@pytest.mark.parametrize(
    ("kind", "options"),
    [(SGD, {}), (SGD, {"momentum": 0.9}), (Adam, {}), (AdamW, {"amsgrad": True})],
)
def test_an_update_that_is_left_out_leaves_nothing_behind(kind: Any, options: dict[str, Any]) -> None:
    model = _model()
    optimizer = kind(model.parameters(), lr=0.1, fused=True, **options)
    # There is no state yet: SGD would take what lies in memory for the second update's momentum.
    assert skips_on_device(optimizer) == (not options and kind is SGD)
    optimizer.step()
    assert skips_on_device(optimizer)
    before = _state(model, optimizer)
    with left_out_where(optimizer, BAD):
        optimizer.step()
    torch.testing.assert_close(_state(model, optimizer), before, rtol=0, atol=0)
    with left_out_where(optimizer, GOOD):
        optimizer.step()
    assert not torch.equal(model.state_dict()["weight"], before[0]["weight"])
    assert not hasattr(optimizer, "found_inf")


def test_all_else_is_left_to_the_host() -> None:
    model = _model()
    parameters = list(model.parameters())
    assert not skips_on_device(SGD(parameters, lr=0.1))
    assert not skips_on_device(_OnesOwn(parameters, lr=0.1, fused=True))
    assert not skips_on_device(Adagrad(parameters, lr=0.1, fused=True))
    hooked = SGD(parameters, lr=0.1, fused=True)
    hooked.register_step_post_hook(lambda *_: None)
    assert not skips_on_device(hooked)
    first, second = SGD(parameters[:1], lr=0.1, fused=True), Adam(parameters[1:], lr=0.1, fused=True)
    both = JointOptimizer([first, second])
    assert not skips_on_device(both)
    both.step()
    assert skips_on_device(both)


def test_a_scaler_reads_on_the_host_until_the_optimizer_has_its_state() -> None:
    model = _model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    for gradient, momentum in ((float("inf"), None), (1.0, 1.0), (float("inf"), 1.0)):
        for parameter in model.parameters():
            parameter.grad = scaler.scale(torch.full_like(parameter, gradient))
        tell_scaler(optimizer)
        scaler.step(optimizer)
        scaler.update()
        for parameter in model.parameters():
            buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
            assert (buffer is None) == (momentum is None)
            assert momentum is None or torch.all(buffer == momentum)
