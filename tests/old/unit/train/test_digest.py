"""The fingerprint of weights: the same for the same bits, another for any other bit, name, dtype or shape."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.train.records.digest import checksums, weights_sha256


def sha_of(model: nn.Module) -> str:
    return weights_sha256(model.state_dict())


class Holder(nn.Module):
    """Any tensors under any names."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


@given(st.integers(0, 3 * 32 - 1))
def test_one_flipped_bit_changes_it(bit: int) -> None:
    values = torch.tensor([1.0, -0.5, 3.25])
    flipped = values.clone()
    flipped.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert sha_of(Holder(a=values)) != sha_of(Holder(a=flipped))
    flipped.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert sha_of(Holder(a=values)) == sha_of(Holder(a=flipped))


ZEROS = torch.zeros(6)


@pytest.mark.parametrize(
    "other",
    [
        Holder(b=ZEROS),
        Holder(a=ZEROS.view(2, 3)),
        Holder(a=torch.zeros(6, dtype=torch.int32)),  # the same bytes
        Holder(a=torch.zeros(12, dtype=torch.float16)),
        Holder(a=-ZEROS),
        Holder(a=ZEROS[:5]),
        Holder(a=ZEROS, b=torch.zeros(0)),
        Holder(a=ZEROS[:3], b=ZEROS[3:]),
        Holder(),
    ],
    ids=["name", "shape", "dtype", "half", "sign of zero", "shorter", "one more", "split", "empty"],
)
def test_all_else_that_can_differ_changes_it(other: nn.Module) -> None:
    assert sha_of(other) != sha_of(Holder(a=ZEROS))


def test_what_is_no_weight_does_not_change_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    expected = sha_of(model)
    assert sha_of(copy.deepcopy(model).to(memory_format=torch.channels_last)) == expected  # type: ignore[call-overload]
    assert sha_of(copy.deepcopy(model).eval().requires_grad_(False)) == expected
    assert sha_of(Holder(a=ZEROS, b=ZEROS)) == sha_of(Holder(b=ZEROS, a=ZEROS))


def test_scalars_and_views() -> None:
    table = torch.arange(12.0).view(3, 4)
    assert sha_of(Holder(a=table.t())) == sha_of(Holder(a=table.t().contiguous()))
    assert sha_of(Holder(a=torch.tensor(3))) != sha_of(Holder(a=torch.tensor(4)))
    assert sha_of(Holder(a=torch.ones(3, dtype=torch.bfloat16))) != sha_of(
        Holder(a=torch.zeros(3, dtype=torch.bfloat16))
    )


def test_checksums_of_float8_move_too() -> None:
    values = torch.ones(4).to(torch.float8_e4m3fn)
    others = torch.tensor([1.0, 1.0, 1.0, 2.0]).to(torch.float8_e4m3fn)
    assert checksums({"a": values}) != checksums({"a": others})
