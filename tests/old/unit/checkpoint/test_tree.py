"""State taken apart and put together again is the state."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint.state_tree import flatten_state, tensor_names, unflatten_state
from paceline.errors import CheckpointError

_NAMES = st.sampled_from(["tensor", "tuple", "pairs", "number", "a", "a/b", "b", "0", "a'", "", "__metadata__"])
_TENSORS = st.builds(
    lambda number, shape: torch.full(shape, number), st.integers(0, 9), st.sampled_from([(), (0,), (2, 1)])
)
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | _NAMES | _TENSORS
_STATES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_NAMES, inner, max_size=3)
        | st.dictionaries(_NAMES | st.integers(-1, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    match one:
        case Tensor():
            return one.dtype == other.dtype and torch.equal(one, other)
        case float():
            return (
                math.isnan(other)
                if math.isnan(one)
                else (one, math.copysign(1, one)) == (other, math.copysign(1, other))
            )
        case list() | tuple():
            return len(one) == len(other) and all(map(_alike, one, other))
        case dict():
            return one.keys() == other.keys() and all(_alike(item, other[key]) for key, item in one.items())
    return bool(one == other)


@given(_STATES, st.sampled_from(["", "worker:3"]))
def test_round_trip(state: Any, path: str) -> None:
    plain, tensors = flatten_state(state, path)
    through_json = json.loads(json.dumps(plain, allow_nan=False))
    assert _alike(state, unflatten_state(through_json, tensors.__getitem__))
    assert tensor_names(through_json) == tensors.keys()
    assert "__metadata__" not in tensors
    assert all(name.startswith(path) for name in tensors)


def test_names_are_the_way_to_a_tensor() -> None:
    _, tensors = flatten_state({"model": {"conv.weight": torch.zeros(1)}, "list": [{3: torch.ones(1)}]})
    assert list(tensors) == ["model/conv.weight", "list/0/3"]


def test_tied_tensors_are_one() -> None:
    weight = torch.zeros(3, requires_grad=True)
    state = {"a": weight, "b": weight.detach(), "view": weight[:2], "other": torch.zeros(3), "turned": torch.eye(2).t()}
    plain, tensors = flatten_state(state)
    assert tensors.keys() == {"a", "view", "other", "turned"}
    again = unflatten_state(plain, tensors.__getitem__)
    assert again["a"] is again["b"] and again["view"].shape == (2,)


@dataclass
class _Point:
    x: float
    y: Tensor


def test_numbers_of_numpy_and_dataclasses() -> None:
    state = {"nan": np.float64("nan"), "i": np.int32(3), "f": np.float32(0.5), "p": _Point(1.0, torch.ones(2))}
    plain, tensors = flatten_state(state)
    again = unflatten_state(json.loads(json.dumps(plain, allow_nan=False)), tensors.__getitem__)
    assert math.isnan(again["nan"]) and again["i"] == 3 and again["f"] == 0.5
    assert again["p"]["x"] == 1.0 and torch.equal(again["p"]["y"], torch.ones(2))


@pytest.mark.parametrize("alien", [object(), {1.5: 2}, {1, 2}, b"bytes", torch.float32, len, _Point])
def test_what_cannot_be_kept_is_named(alien: Any) -> None:
    with pytest.raises(CheckpointError, match=r"The state at 'kept/mine/1' is a .*cannot hold"):
        flatten_state({"kept": {"mine": [0, alien]}})


def test_a_state_that_contains_itself() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(CheckpointError, match="contains itself"):
        flatten_state(state)
