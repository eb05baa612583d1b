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
from paceline.object_collectives import decode, encode


@dataclass(frozen=True)
class Point:
    x: int
    values: tuple[Any, ...]


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["object", "tensor"]) | st.integers(), inner)
        | st.builds(Point, st.integers(), st.lists(inner).map(tuple))
    ),
    max_leaves=20,
)


def sent(value: Any) -> Any:
    return decode(encode(value, [Point]), [Point])


@given(VALUES)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    arrived = sent(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_tensors_arrive_as_they_were_and_tied_ones_are_tied_again() -> None:
    tied = torch.randn(3, 4).t()  # not contiguous
    tensors = [tied, torch.randn(()), torch.empty(0, 5), torch.randn(7).bfloat16(), torch.tensor([True, False]), tied]
    arrived = sent({"all": tensors})
    for original, received in zip(tensors, arrived["all"], strict=True):
        assert original.dtype == received.dtype
        assert torch.equal(original, received)
    assert arrived["all"][0] is arrived["all"][-1]
    assert math.isnan(sent(math.nan))


@pytest.mark.parametrize("value", [object(), {1}, b"bytes", {(1, 2): 3}])
def test_what_messages_cannot_hold_is_an_error_of_the_sender(value: object) -> None:
    with pytest.raises(TypeError, match=f"at '0' is a {type(value).__name__}"):
        encode([value])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b"[1]",
        json.dumps([{"tensor": "3"}, []]).encode(),
        json.dumps([{"object": ["Unknown", {"x": 1}]}, []]).encode(),
        json.dumps([{"object": ["Point", {"x": 1}]}, []]).encode(),
        json.dumps([{"object": ["Point", {"x": 1, "values": [], "y": 1}]}, []]).encode(),
        json.dumps([{"pairs": [[1, 2, 3]]}, []]).encode(),
        json.dumps([1, [["a", "float32", [-1]]]]).encode(),
        json.dumps([1, [["a", "load", [1]]]]).encode(),
    ],
)
def test_what_nobody_encoded_is_refused_in_a_sentence(text: bytes) -> None:
    message = torch.frombuffer(bytearray(len(text).to_bytes(8, "big") + text), dtype=torch.uint8)
    with pytest.raises(DivergenceError, match="cannot be read"):
        decode(message, [Point])


@pytest.mark.parametrize("length", [0, 7, 12, 40])
def test_a_message_that_breaks_off_is_refused(length: int) -> None:
    with pytest.raises(DivergenceError, match="cannot be read"):
        decode(encode({"a": torch.arange(9)})[:length])
