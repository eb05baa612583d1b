"""A backward pass in two halves gives the gradients of a whole one, and is not split where it would not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.pipeline.halves import can_split, first_half, num_bytes, second_half

WIDTH = 6


class _Net(nn.Module):
    def __init__(self, forward: Callable[[_Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.offset = nn.Parameter(torch.randn(WIDTH))
        self._forward = forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self._forward(self, inputs)


def _bias_for_all(net: _Net, inputs: Tensor) -> Tensor:
    """As the position bias of T5: made once of a parameter, added by every attention."""
    offset = torch.sigmoid(net.offset)
    result: Tensor = net.other(torch.relu(net.one(inputs) + offset)) + offset
    return result


SPLIT: dict[str, Callable[[_Net, Tensor], Tensor]] = {
    "a chain": lambda net, inputs: net.norm(net.other(torch.relu(net.one(inputs)))),
    "a skip connection": lambda net, inputs: inputs + net.other(torch.tanh(net.one(net.norm(inputs)))),
    "a result that its operation saves": lambda net, inputs: torch.relu(net.one(inputs)),
    "a parameter beside": lambda net, inputs: net.one(inputs) * torch.tanh(net.offset * 2),
}
WHOLE: dict[str, Callable[[_Net, Tensor], Tensor]] = {
    "a layer that is called twice": lambda net, inputs: net.one(torch.relu(net.one(inputs))),
    "a bias for all": _bias_for_all,
}


def _leaf() -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()


@pytest.mark.parametrize("name", SPLIT)
def test_halves_give_the_gradients_of_a_whole_pass(name: str) -> None:
    net, given = _Net(SPLIT[name]), torch.linspace(0, 1, 4 * WIDTH).reshape(4, WIDTH)
    whole, inputs = _leaf(), _leaf()
    net(whole).backward(given)
    expected = {key: parameter.grad for key, parameter in net.named_parameters() if parameter.grad is not None}
    net.zero_grad()
    weights = [net.get_parameter(key) for key in expected]
    output = net(inputs)
    assert can_split([output], [inputs], weights)
    parts = first_half([output], [given], [inputs], weights)
    assert inputs.grad is not None and whole.grad is not None
    assert torch.equal(inputs.grad, whole.grad)
    assert num_bytes(parts) >= given.nbytes
    second_half(weights, parts)
    assert all(torch.equal(net.get_parameter(key).grad, gradient) for key, gradient in expected.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WHOLE)
def test_a_parameter_that_acts_at_several_places_is_not_put_off(name: str) -> None:
    net, inputs = _Net(WHOLE[name]), _leaf()
    output = net(inputs)
    used = [
        one
        for one in net.parameters()
        if torch.autograd.grad(output.sum(), one, retain_graph=True, allow_unused=True)[0] is not None
    ]
    assert not can_split([output], [inputs], used)
