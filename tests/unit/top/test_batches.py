"""A batch may be any container of tensors: it is moved to a device and stays of its type."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors import map_tensors, tensors, to_device


@dataclasses.dataclass(frozen=True)
class Record:
    first: Any
    second: Any


class Pair(NamedTuple):
    first: Any
    second: Any


MAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda a, b: {"a": a, "b": b},
    "ordered": lambda a, b: OrderedDict(a=a, b=b),
    "userdict": lambda a, b: UserDict(a=a, b=b),
    "dataclass": Record,
    "namedtuple": Pair,
    "tuple": lambda a, b: (a, b, 0.5),
    "list": lambda a, b: [a, "both", b],
}
LEAVES: dict[str, Callable[[int, int], Any]] = {
    # Of the samples start … stop - 1.
    "tensor": lambda start, stop: torch.arange(start * 2.0, stop * 2.0).view(-1, 2),
    "classes": lambda start, stop: torch.arange(start, stop),
    "array": lambda start, stop: np.arange(start, stop, dtype=np.float32),
    "texts": lambda start, stop: [f"text {number}" for number in range(start, stop)],
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A container of what, or a leaf of a kind."""

    kind: str
    inside: tuple[Shape, ...] = ()

    def of(self, start: int, stop: int) -> Any:
        if not self.inside:
            return LEAVES[self.kind](start, stop)
        return MAKERS[self.kind](*(one.of(start, stop) for one in self.inside))


shapes = st.recursive(
    st.sampled_from(sorted(LEAVES)).map(Shape),
    lambda inner: st.builds(Shape, st.sampled_from(sorted(MAKERS)), st.tuples(inner, inner)),
    max_leaves=6,
)


def same(one: Any, other: Any) -> bool:
    """The same values in containers of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict | UserDict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    if isinstance(one, Record):
        return same(one.first, other.first) and same(one.second, other.second)
    return bool(one == other)


@given(shapes, st.integers(5, 9))
def test_everything_moves_and_nothing_else_changes(shape: Shape, num: int) -> None:
    content = shape.of(0, num)
    there = to_device(content, torch.device("meta"))
    assert type(there) is type(content)
    assert all(tensor.is_meta for tensor in tensors(there))
    assert len(list(tensors(there))) == len(list(tensors(content)))
    wide = to_device(content, torch.device("cpu"), torch.float64)
    assert {tensor.dtype for tensor in tensors(wide)} <= {torch.float64, torch.int64}
    assert same(map_tensors(content, torch.clone), content)
