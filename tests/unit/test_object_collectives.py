"""Messages without pickles: what is encoded arrives, and what nobody encoded is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DivergenceError
from paceline.object_collectives import decode, empty_tensors, encode


@dataclass(frozen=True)
class Point:
    x: int
    values: tuple[Any, ...]


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.builds(Point, st.integers(), st.lists(inner).map(tuple))
        | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


def sent(value: Any) -> Any:
    text, tensors = encode(value)
    received = [empty.copy_(tensor) for empty, tensor in zip(empty_tensors(text), tensors, strict=True)]
    return decode(text, received, [Point])


@given(VALUES)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    arrived = sent(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_tensors_arrive_as_they_were_and_tied_ones_are_tied_again() -> None:
    tied = torch.randn(3, 4).t()  # not contiguous
    tensors = [tied, torch.randn(()), torch.empty(0, 5), torch.randn(7).bfloat16(), torch.tensor([True, False]), tied]
    arrived = sent({"all": tensors, "dtype": torch.float16})
    assert arrived["dtype"] is torch.float16
    for original, received in zip(tensors, arrived["all"], strict=True):
        assert original.dtype == received.dtype
        assert torch.equal(original, received)
    assert arrived["all"][0] is arrived["all"][-1]
    assert math.isnan(sent(math.nan))


def test_what_messages_cannot_hold_is_an_error_of_the_sender() -> None:
    with pytest.raises(TypeError, match="cannot hold a object"):
        encode([object()])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"value": 1}',
        json.dumps({"value": {"tensor": 3}, "tensors": []}).encode(),
        json.dumps({"value": {"Unknown": [1]}, "tensors": []}).encode(),
        json.dumps({"value": {"Point": [1, 2, 3, 4]}, "tensors": []}).encode(),
        json.dumps({"value": {"a": 1, "b": 2}, "tensors": []}).encode(),
        json.dumps({"value": {"dtype": "load"}, "tensors": []}).encode(),
        json.dumps({"value": 1, "tensors": [["float32", [-1]]]}).encode(),
        json.dumps({"value": 1, "tensors": [["load", [1]]]}).encode(),
    ],
)
def test_what_nobody_encoded_is_refused_in_a_sentence(text: bytes) -> None:
    with pytest.raises(DivergenceError, match="cannot be read"):
        decode(text, empty_tensors(text), [Point])
