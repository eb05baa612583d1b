"""Weights of all norm layers repeated by one call: gradients are those of layers that repeat their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.utils.checkpoint import checkpoint

from paceline.parallel.assignment import ShardRange
from paceline.parallel.batch_norm.norm import NormStatistics, ShardBatchNorm, replace_batch_norm
from paceline.parallel.batch_norm.repeated import RepeatedParameters

Loss = Callable[[nn.ModuleDict, Tensor], Tensor]


def _model() -> nn.ModuleDict:
    torch.manual_seed(0)
    names = ("first", "second", "tied", "frozen", "unused")
    model = nn.ModuleDict({name: nn.BatchNorm1d(3 + (name == "unused"), dtype=torch.float64) for name in names})
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model["tied"].weight = model["first"].weight
    model["frozen"].bias.requires_grad_(False)
    replace_batch_norm(model, ShardBatchNorm)
    return model


def _of_all(model: nn.ModuleDict, x: Tensor) -> Tensor:
    for name in ("first", "second", "second", "tied", "frozen"):
        x = x + model[name](x).sin()
    return x


def _computed_again(model: nn.ModuleDict, x: Tensor, *, use_reentrant: bool) -> Tensor:
    return _of_all(model, checkpoint(_of_all, model, x, use_reentrant=use_reentrant))


def _weight(model: nn.ModuleDict, name: str) -> nn.Parameter:
    return cast(nn.Parameter, model[name].weight)


def _with_other_values(model: nn.ModuleDict, x: Tensor) -> Tensor:
    """Those of an average of the weights, for example."""
    _weight(model, "first").data = _weight(model, "second").detach() * 2
    with torch.no_grad():
        _weight(model, "frozen").mul_(2)
    return _of_all(model, x)


def _with_other_tensors(model: nn.ModuleDict, x: Tensor) -> Tensor:
    others = {"first.weight": _weight(model, "second") * 2}
    with stateless._reparametrize_module(model, others):
        return _of_all(model, x)


@pytest.mark.parametrize(
    "loss",
    [
        _of_all,
        partial(_computed_again, use_reentrant=False),
        partial(_computed_again, use_reentrant=True),
        _with_other_values,
        _with_other_tensors,
    ],
)
def test_gradients_are_those_of_layers_that_repeat_their_own(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    x = torch.randn(8, 3, dtype=torch.float64)
    factors = torch.randn_like(x)
    found = []
    for is_joint in (True, False):
        one, values = copy.deepcopy(model), x.clone().requires_grad_()
        if not is_joint:
            monkeypatch.setattr(RepeatedParameters, "repeated", lambda *_: {})
        statistics = NormStatistics(one)
        for _ in range(2):  # a second pass adds to the gradients
            statistics.begin_pass(ShardRange(0, (2,) * 4, (2,) * 4, are_interleaved=True))
            output = loss(one, values)
            with statistics.backward():
                (output * factors).sum().backward()
            statistics.end_pass()
        grads: list[Any] = [parameter.grad for parameter in one.parameters()]
        found.append([output, values.grad, *grads])
    assert [grad is None for grad in found[0]] == [grad is None for grad in found[1]]
    assert found[0][-1] is None, "a layer without a part in the loss has no gradient"
    ours, own = ([grad for grad in one if grad is not None] for one in found)
    torch.testing.assert_close(ours, own, rtol=1e-13, atol=1e-13)
    assert any(torch.count_nonzero(grad) for grad in ours[2:])


def test_each_parameter_stands_once_and_only_those_that_are_trained() -> None:
    model = _model()
    repeated = RepeatedParameters(model.children()).repeated(4)
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert set(repeated) == trained
    for parameter, (values, _) in repeated.items():
        assert torch.equal(values, parameter.repeat(4))
    with torch.no_grad():
        assert not RepeatedParameters(model.children()).repeated(4)
