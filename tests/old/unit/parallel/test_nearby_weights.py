"""Weights that lie near to a model's own, and are what they were afterwards, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from paceline.parallel.live_bytes import LiveBytes
from paceline.parallel.loss import nearby_weights as module
from paceline.parallel.loss.nearby_weights import nearby_weights

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


class _Holds(nn.Module):
    def __init__(self, *values: Tensor) -> None:
        super().__init__()
        self.held = nn.ParameterList(values)


def _bytes_of(model: nn.Module) -> list[Any]:
    dense = [one.detach().clone(memory_format=torch.contiguous_format) for one in model.parameters() if one.numel()]
    return [torch.atleast_1d(one).view(torch.uint8) for one in dense]


def _values(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.complex128)
    return (values if dtype.is_complex else values.real).to(dtype)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_weights_grow_by_at_most_a_tenth_and_zeros_become_something(dtype: torch.dtype) -> None:
    weights = _values((40, 30), dtype)
    weights[0] = 0
    model = _Holds(weights.clone())
    (held,) = model.parameters()
    with nearby_weights(model):
        before, now = (torch.view_as_real(one) if dtype.is_complex else one for one in (weights, held.detach()))
        assert torch.equal(now.sign()[1:], before.sign()[1:])
        growth = (now.double() / before.double())[1:] - 1
        assert 0 <= growth.min() < growth.max() <= 0.1 + torch.finfo(now.dtype).eps
        assert (growth > 0).double().mean() > 0.9
        assert 0 <= now[0].min() < now[0].max() <= 0.1
    assert torch.equal(held, weights)


_SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-40, 3.4e38, 1.0)


@given(
    dtype=st.sampled_from(_DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    special=st.lists(st.sampled_from(_SPECIAL), max_size=6),
    seed=st.integers(0, 9),
    at_once=st.sampled_from((1, 3, 2**24)),
)
def test_afterwards_every_bit_is_as_before(
    dtype: torch.dtype, shape: tuple[int, ...], special: list[float], seed: int, at_once: int
) -> None:
    weights = _values(shape, dtype, seed=seed)
    values = weights.view(-1)
    for number, value in enumerate(special[: len(values)]):
        values[number] = value
    model = _Holds(weights, _values((2, 3), dtype).t(), torch.zeros(3, dtype=dtype))
    before = _bytes_of(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_AT_ONCE", at_once)
        with nearby_weights(model):
            changed = _bytes_of(model)
    assert not all(map(torch.equal, before, changed))
    assert all(map(torch.equal, before, _bytes_of(model)))


def test_what_is_not_trained_stays_and_shared_memory_is_restored() -> None:
    shared = torch.arange(6.0)
    fixed = nn.Parameter(torch.ones(3), requires_grad=False)
    model = _Holds(nn.Parameter(shared), nn.Parameter(shared[2:]), fixed)
    with nearby_weights(model):
        assert torch.equal(fixed, torch.ones(3))
        assert not torch.equal(shared, torch.arange(6.0))
    assert torch.equal(shared, torch.arange(6.0))


def test_weights_that_are_no_plain_numbers_stay() -> None:
    two = TwoTensor(torch.ones(3), torch.ones(3))
    model = _Holds(nn.Parameter(two), nn.Parameter(torch.ones(3)))
    with nearby_weights(model):
        assert torch.equal(two.a, torch.ones(3))
        assert not torch.equal(model.held[1], torch.ones(3))


def test_an_error_on_the_way_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Holds(torch.ones(4), torch.ones(5))
    grow = module._growth

    def fails_once(numbers: Tensor, is_zero: Tensor | None) -> Tensor:
        if len(numbers) == 5:
            raise MemoryError
        return grow(numbers, is_zero)

    monkeypatch.setattr(module, "_growth", fails_once)
    with pytest.raises(MemoryError), nearby_weights(model):
        pass
    assert all(bool((one == 1).all()) for one in model.parameters())


def test_little_memory_is_needed_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.ones(64, 4096)
    model = _Holds(weights)
    monkeypatch.setattr(module, "_MOST_AT_ONCE", 8192)
    with LiveBytes() as live:
        live.begin()
        with nearby_weights(model):
            pass
    assert 0 < live.peak_bytes < 0.1 * weights.nbytes
