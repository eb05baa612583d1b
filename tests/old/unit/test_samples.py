"""Batches are cut along their samples, whatever they are made of, or refused by the place that cannot be."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import attr
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from paceline.containers import copied, tensors, to_device
from paceline.errors import ModelError
from paceline.samples import Readings, Samples


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    first: Any
    second: Any


@dataclasses.dataclass
class Derived:
    """Its constructor takes other things than it holds."""

    first: dataclasses.InitVar[Any]
    second: Any
    kept: Any = dataclasses.field(init=False)

    def __post_init__(self, first: Any) -> None:
        self.kept = first


@attr.frozen
class Attrs:
    first: Any
    second: Any


class Pair(NamedTuple):
    first: Any
    second: Any


class Attributes(dict[str, Any]):
    """Its entries are its attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Noted(UserDict[str, Any]):
    """Holds something besides its entries, as transformers' BatchEncoding does."""

    def __init__(self, data: dict[str, Any], notes: Any) -> None:
        super().__init__(data)
        self.notes = notes


MAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda a, b: {"a": a, "b": b},
    "ordered": lambda a, b: OrderedDict(a=a, b=b),
    "defaultdict": lambda a, b: defaultdict(list, a=a, b=b),
    "userdict": lambda a, b: UserDict(a=a, b=b),
    "noted": lambda a, b: Noted({"a": a}, b),
    "attributes": lambda a, b: Attributes(a=a, b=b),
    "proxy": lambda a, b: types.MappingProxyType({"a": a, "b": b}),
    "dataclass": Record,
    "derived": Derived,
    "attrs": Attrs,
    "namedtuple": Pair,
    "tuple": lambda a, b: (a, b, 0.5),
    "list": lambda a, b: [a, "both", b],
    "deque": lambda a, b: deque([a, b]),
}


def _leaf(kind: str, num_samples: int) -> Any:
    rows = torch.arange(num_samples * 2.0).view(num_samples, 2)
    made: dict[str, Callable[[], Any]] = {
        "tensor": lambda: rows,
        "integers": lambda: torch.arange(num_samples),
        "array": rows.numpy,
        "texts": lambda: [f"text {number}" for number in range(num_samples)],
        "objects": lambda: tuple(Thing(number) for number in range(num_samples)),
        "ragged": lambda: [torch.full((number + num_samples + 1,), number) for number in range(num_samples)],
        "coo": rows.to_sparse,
        "csr": rows.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor(
            [torch.full((number + 1,), 1.0 * number) for number in range(num_samples)], layout=torch.jagged
        ),
        "shared": lambda: ["a", None, 3, torch.tensor(2.0), np.float32(1.0)][num_samples % 5],
    }
    return made[kind]()


LEAVES = ["tensor", "integers", "array", "texts", "objects", "ragged", "coo", "csr", "nested", "shared"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A container of what, or a leaf of a kind."""

    kind: str
    inside: tuple[Shape, ...] = ()

    def of(self, num_samples: int) -> Any:
        if not self.inside:
            return _leaf(self.kind, num_samples)
        return MAKERS[self.kind](*(one.of(num_samples) for one in self.inside))


class Thing:
    """An object that nobody knows."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def _shapes() -> st.SearchStrategy[Shape]:
    leaves = st.sampled_from(LEAVES).map(Shape)
    return st.recursive(
        leaves, lambda inner: st.builds(Shape, st.sampled_from(list(MAKERS)), st.tuples(inner, inner)), max_leaves=6
    )


def assert_equal(one: Any, other: Any) -> None:
    """The same values in containers of the same types."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.layout, one.is_nested) == (other.dtype, other.layout, other.is_nested)
        if one.is_nested:
            assert_equal(list(one.unbind()), list(other.unbind()))
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, PackedSequence):
        assert_equal(list(pad_packed_sequence(one)), list(pad_packed_sequence(other)))
    elif isinstance(one, dict | UserDict | types.MappingProxyType):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
        if isinstance(one, Attributes):
            assert vars(one) is one
        elif isinstance(one, Noted) and isinstance(other, Noted):
            assert_equal(one.notes, other.notes)
    elif isinstance(one, list | tuple | deque):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    elif isinstance(one, Record | Attrs):
        assert_equal((one.first, one.second), (other.first, other.second))
    elif isinstance(one, Derived):
        assert_equal((one.kept, one.second), (other.kept, other.second))
    else:
        assert one == other


def _joined(parts: list[Any]) -> Any:
    """The cuts of one leaf, together again."""
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.is_nested:
        return torch.nested.as_nested_tensor([row for part in parts for row in part.unbind()], layout=first.layout)
    if isinstance(first, torch.Tensor) and first.layout == torch.sparse_csr:
        return torch.cat([part.to_dense() for part in parts]).to_sparse_csr()
    if isinstance(first, torch.Tensor) and first.ndim:
        joined = torch.cat(parts)
        return joined.coalesce() if joined.is_sparse else joined
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, list | tuple):
        return type(first)(entry for part in parts for entry in part)
    return first


def _leaves(value: Any, shape: Shape) -> list[Any]:
    if not shape.inside:
        return [value]
    found: list[Any]
    if isinstance(value, Record | Attrs | Pair):
        found = [value.first, value.second]
    elif isinstance(value, Derived):
        found = [value.kept, value.second]
    elif isinstance(value, Noted):
        found = [value["a"], value.notes]
    elif isinstance(value, dict | UserDict | types.MappingProxyType):
        found = [value["a"], value["b"]]
    else:
        found = [value[0], value[1 if shape.kind == "tuple" else -1]]
    return [leaf for one, inner in zip(found, shape.inside, strict=True) for leaf in _leaves(one, inner)]


@given(_shapes(), st.integers(4, 9), st.data())
def test_cuts_put_together_are_the_batch(shape: Shape, num_samples: int, data: st.DataObject) -> None:
    content = shape.of(num_samples)
    samples = Samples.of(content, num_samples)
    middle = data.draw(st.integers(1, num_samples - 1))
    parts = [samples.cut(0, middle), samples.beyond(middle).cut(0, num_samples - middle)]
    for part in parts:
        assert type(part) is type(content)
    for number, leaf in enumerate(_leaves(content, shape)):
        assert_equal(_joined([_leaves(part, shape)[number] for part in parts]), leaf)
    assert_equal(samples.cut(0, num_samples), content)
    assert_equal(copied(content), content)


@given(_shapes(), st.integers(4, 9))
def test_everything_moves_to_the_device(shape: Shape, num_samples: int) -> None:
    """To the meta device, which every machine has; sparse and nested tensors have no place there."""
    content = shape.of(num_samples)
    found = list(tensors(content))
    if all(tensor.layout == torch.strided for tensor in found):
        there = to_device(content, torch.device("meta"))
        assert all(tensor.is_meta for tensor in tensors(there))
        assert len(list(tensors(there))) == len(found)
    wide = to_device(content, torch.device("cpu"), torch.float64)
    assert all(tensor.dtype in (torch.float64, torch.int64) for tensor in tensors(wide))
    if all(tensor.dtype == torch.int64 for tensor in found):
        assert wide is content  # nothing to do, nothing made


@pytest.mark.parametrize("lengths", [(5, 4, 2, 2), (2, 5, 1, 4)])
def test_packed_sequences_are_cut_and_stay_packed(lengths: tuple[int, ...]) -> None:
    padded = torch.randn(4, 5, 3)
    is_sorted = lengths[0] == 5
    packed = pack_padded_sequence(padded, torch.tensor(lengths), batch_first=True, enforce_sorted=is_sorted)
    samples = Samples.of({"x": packed}, 4)
    for start, stop in ((0, 2), (1, 4), (3, 4)):
        part = samples.cut(start, stop)["x"]
        assert isinstance(part, PackedSequence)
        assert (part.sorted_indices is None) == is_sorted
        values, own = pad_packed_sequence(part, batch_first=True)
        assert tuple(own) == lengths[start:stop]
        for row, (length, whole) in enumerate(zip(own, padded[start:stop], strict=True)):
            torch.testing.assert_close(values[row, :length], whole[:length], rtol=0, atol=0)
    there = to_device(packed, torch.device("cpu"), torch.float64)
    assert isinstance(there, PackedSequence)
    assert there.data.dtype == torch.float64


REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown object": ({"x": Record(Thing(1), torch.zeros(8))}, "batch['x'].first, of type Thing, which cannot"),
    "a set": ([torch.zeros(8), {1, 2}], "batch[1], of type set, which cannot be cut"),
    "rows of another number": (
        {"x": (torch.zeros(8), torch.zeros(3, 4))},
        "has in batch['x'][1] a Tensor of shape (3, 4) for 8 samples",
    ),
    "an array of another length": (Attrs(torch.zeros(8), np.zeros(7)), "in batch.second a ndarray of shape (7,) for"),
    "a list of another length": (
        {"x": torch.zeros(8), "names": ["a", "b", "c"]},
        "batch['names'], of type list, which",
    ),
    "unknown objects, too few": ([torch.zeros(8), [Thing(1), Thing(2)]], "batch[1], of type list, which has 2 entries"),
    "a layout that has no rows": ({"x": torch.eye(8).to_sparse_csc()}, "batch['x'], of type Tensor, whose layout"),
    "something besides the entries": (Noted({"x": torch.zeros(8)}, torch.zeros(3)), "in batch.notes a Tensor of"),
    "a list that could be both": (
        {"x": torch.zeros(8), "pair": [torch.zeros(8, 2)] * 8},
        "batch['pair'], of type list, which in a batch of 8 samples could be 8 fields or one entry for each sample",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_named(name: str) -> None:
    content, sentence = REFUSED[name]
    with pytest.raises(ModelError) as refused:
        Samples.of(content, 8)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("The batch given to run.step ")
    assert "\n" not in str(refused.value)


class Strict(dict[str, Any]):
    """Cannot be copied."""

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError("stays here")


def test_a_container_that_cannot_be_made_again_is_named() -> None:
    with pytest.raises(ModelError, match=r"batch\[0\], of type Strict, which cannot be made again \(stays here\)"):
        Samples.of([Strict(x=torch.zeros(4)), torch.zeros(4)], 4)


def test_a_list_of_fields_is_none_of_samples() -> None:
    """Two tensors in a list, and as many samples."""
    tokens, targets = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    for content in ([tokens, targets], (tokens, targets)):  # what a data set of pairs gives, at the top
        part = Samples.of(content, 2).cut(1, 2)
        assert type(part) is type(content)
        assert [tuple(one.shape) for one in part] == [(1, 5), (1, 5)]
    mixed = [torch.zeros(2, 3, 4, 4), torch.zeros(2)]  # these are no two samples: they have nothing in common
    assert len(Samples.of({"x": mixed}, 2).cut(0, 1)["x"]) == 2


def test_a_list_that_could_be_both_is_what_it_was_before() -> None:
    images: dict[str, Any] = {"x": [torch.zeros(3, 5, number + 4) for number in range(4)]}
    three: dict[str, Any] = {"x": images["x"][:3]}  # of three channels each
    with pytest.raises(ModelError, match="could be 3 fields or one entry for each sample"):
        Samples.of(three, 3)
    readings: Readings = {}
    assert len(Samples.of(images, 4, readings).cut(1, 3)["x"]) == 2
    assert len(Samples.of(three, 3, readings).cut(1, 3)["x"]) == 2

    views: dict[str, Any] = {"x": [torch.zeros(5, 2), torch.ones(5, 2)]}
    readings = {}
    assert Samples.of(views, 5, readings).cut(1, 3)["x"][1].shape == (2, 2)
    few = {"x": [view[:2] for view in views["x"]]}
    assert Samples.of(few, 2, readings).cut(1, 2)["x"][1].shape == (1, 2)


def test_a_list_is_of_fields_where_default_collating_made_lists_of_as_many() -> None:
    """Four views of each image, as DINO and SwAV take them, on a worker that has four images."""
    views = [torch.rand(4, 3, 5, 5) for _ in range(4)]
    collated = [views, torch.zeros(4)]
    for content, place in (([views, torch.ones(4)], 0), ({"views": [view * 2 for view in views]}, "views")):
        with pytest.raises(ModelError, match="could be 4 fields or one entry for each sample"):
            Samples.of(content, 4)
        cut: Any = Samples.of(content, 4, collated=collated).cut(1, 3)
        assert [tuple(view.shape) for view in cut[place]] == [(2, 3, 5, 5)] * 4
    boxes = {"targets": [{"boxes": torch.zeros(4, 4)}] * 4}  # each image has four boxes
    with pytest.raises(ModelError, match="could be 4 fields"):
        Samples.of(boxes, 4, collated=collated)
    names = {"names": list("abcd")}
    assert Samples.of(names, 4, collated=collated).cut(1, 3) == {"names": ["b", "c"]}


def test_one_sample_is_never_ambiguous() -> None:
    content = {"x": [torch.zeros(1, 3)], "names": ["a"]}
    readings: Readings = {}
    assert_equal(Samples.of(content, 1, readings).cut(0, 1), content)
    assert not readings


def test_a_tokenizers_batch_stays_what_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    outputs = pytest.importorskip("transformers.modeling_outputs")
    encoded = transformers.BatchEncoding(
        {"input_ids": torch.arange(8).view(4, 2), "names": list("abcd")}, encoding=None, n_sequences=1
    )
    part = Samples.of(encoded, 4).cut(1, 3)
    assert type(part) is transformers.BatchEncoding
    assert part.input_ids.tolist() == [[2, 3], [4, 5]]
    assert part["names"] == ["b", "c"]
    assert encoded["names"] == list("abcd")
    output = outputs.SequenceClassifierOutput(logits=torch.arange(4.0))
    cut = Samples.of(output, 4).cut(0, 2)
    assert type(cut) is outputs.SequenceClassifierOutput
    assert cut.logits.tolist() == cut["logits"].tolist() == cut[0].tolist() == [0.0, 1.0]
