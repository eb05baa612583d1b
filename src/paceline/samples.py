"""The samples of a batch: which parts of its content belong to one sample each, and the content of some of them.

A tensor or a NumPy array has a row for each sample; a list or a tuple that is no container of fields has an entry for
each. Numbers, texts, None and tensors without dimensions belong to all samples. Whatever else there is cannot be
divided, and is refused by its place in the batch, before anything is computed.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from paceline.containers import Container, open_container
from paceline.errors import ModelError
from paceline.sharded_batch import ShardedBatch

_SHARED = (str, bytes, numbers.Number, np.generic, enum.Enum, torch.dtype, torch.device, type(None))

Readings = dict[str, bool]
"""Places of lists and tuples in the batches of a run, and whether the values there are fields rather than samples."""


@dataclass(frozen=True)
class _Part:
    """A value in a batch."""

    cut: Callable[[int, int], Any]
    """The value for the samples start … stop - 1."""
    is_divided: bool
    """Whether something in it belongs to single samples."""


class Samples:
    """The content of a batch, which can be cut along its samples."""

    def __init__(self, root: _Part, first: int = 0) -> None:
        self._root = root
        self._first = first

    @classmethod
    def of(cls, content: Any, num_samples: int, readings: Readings | None = None, *, collated: Any = None) -> Samples:
        """
        Args:
            content: what a script gives to `run.step`.
            readings: of the batches before this one; that of this one is added. Two tensors in a list are two fields
                or, in a batch of two samples, could be a sample each: then they are what they have been before.
            collated: what `run.batches` yielded. torch's default collating makes lists of fields there, such as the
                views of an image; a list of as many values is one of fields too.

        Raises:
            ModelError: some of the content cannot be divided among workers.
        """
        if isinstance(content, ShardedBatch):
            if content.num_samples != num_samples:
                raise ModelError(
                    f"The batch given to run.step has {content.num_samples} samples instead of the {num_samples} that "
                    "run.batches yielded; give it that batch, or what its map(function) returns."
                )
            return cls(_Part(lambda start, _stop: content.beginning_at(start), is_divided=True))
        return cls(_Reader(num_samples, {} if readings is None else readings, collated).read(content, "batch"))

    def cut(self, start: int, stop: int) -> Any:
        """The content for the samples start … stop - 1: views of the same tensors, in containers of the same types."""
        return self._root.cut(self._first + start, self._first + stop)

    def beyond(self, start: int) -> Samples:
        """The samples from `start` on."""
        return Samples(self._root, self._first + start)


class _Reader:
    """Reads the content of a batch of a number of samples."""

    def __init__(self, num_samples: int, readings: Readings, collated: Any) -> None:
        self._num_samples = num_samples
        self._readings = readings
        self._collated = collated

    def read(self, value: Any, place: str) -> _Part:
        if isinstance(value, _SHARED):
            return _shared(value)
        if isinstance(value, Tensor | np.ndarray | PackedSequence):
            return self._rows(value, place)
        container = open_container(value)
        if container is None:
            raise self._refused(place, value, "which cannot be cut into samples")
        if isinstance(value, list | tuple) and not container.is_named and value:
            return self._list(value, container, place)
        return self._fields(value, container, place)

    def _rows(self, value: Any, place: str) -> _Part:
        if not isinstance(value, PackedSequence) and value.ndim == 0:
            return _shared(value)
        cut, num_rows = _cut_of(value)
        if cut is None:
            raise self._refused(place, value, f"whose layout {value.layout} cannot be cut exactly")
        if num_rows != self._num_samples:
            is_ragged = isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_nested)
            shape = f"{num_rows} rows" if is_ragged else f"shape {tuple(value.shape)}"
            raise ModelError(
                f"The batch given to run.step has in {place} a {type(value).__name__} of {shape} for "
                f"{self._num_samples} samples; each tensor in it needs one row for every sample that run.batches "
                "yielded, in their order."
            )
        return _Part(lambda start, stop: cut(value, start, stop), is_divided=True)

    def _fields(self, value: Any, container: Container, place: str) -> _Part:
        """Each value of a container is cut by itself."""
        parts = [self.read(one, place + where) for one, where in zip(container.values, container.places, strict=True)]
        if not any(part.is_divided for part in parts):
            return _shared(value)
        if type(value) not in (dict, list, tuple):
            self._check_made(value, container, place)
        return _Part(
            lambda start, stop: container.make([part.cut(start, stop) for part in parts]),
            is_divided=True,
        )

    def _check_made(self, value: Any, container: Container, place: str) -> None:
        """Raises ModelError if a container of this type with other values cannot be made."""
        try:
            made = open_container(container.make(container.values))
        except Exception as problem:
            raise self._refused(place, value, f"which cannot be made again ({problem})") from None
        if made is None or made.places != container.places:
            raise self._refused(place, value, "which is not the same when it is made again")

    def _list(self, value: Any, container: Container, place: str) -> _Part:
        """A list or tuple: of fields, or of one entry for each sample."""
        problem: ModelError | None = None
        fields: _Part | None = None
        try:
            fields = self._fields(value, container, place)
        except ModelError as error:
            problem = error
        may_be_fields = fields is not None and fields.is_divided
        may_be_samples = len(value) == self._num_samples
        if may_be_fields and (not may_be_samples or self._are_fields(value, place)):
            assert fields is not None
            if self._num_samples > 1:
                self._readings[place] = True
            return fields
        if may_be_samples:
            if self._num_samples > 1:
                self._readings[place] = False
            return _Part(lambda start, stop: container.make(value[start:stop]), is_divided=True)
        if problem is not None and any(open_container(one) or isinstance(one, Tensor | np.ndarray) for one in value):
            raise problem
        raise self._refused(place, value, f"which has {len(value)} entries for {self._num_samples} samples")

    def _are_fields(self, value: Sequence[Any], place: str) -> bool:
        """Whether a list that could be both holds fields."""
        known = self._readings.get(place)
        if known is not None:
            return known
        kinds = {_kind(one) for one in value}
        is_of_records = any(kind[0] == "record" for kind in kinds)
        if len(kinds) > 1 or self._num_samples == 1 or (place == "batch" and not is_of_records):
            return True
        if any(_kinds_in(one) == _kinds_in(value) for one in _lists_in(self._collated)):
            return True
        raise self._refused(
            place,
            value,
            f"which in a batch of {self._num_samples} samples could be {len(value)} fields or one entry for each sample"
            "; make it a dictionary or a dataclass if these are fields, else one NumPy array of objects",
        )

    def _refused(self, place: str, value: Any, reason: str) -> ModelError:
        return ModelError(
            f"The batch given to run.step cannot be divided among workers because of {place}, of type "
            f"{type(value).__name__}, {reason}."
        )


def _lists_in(content: Any) -> Iterator[Sequence[Any]]:
    """The lists and tuples inside the containers of a content."""
    container = open_container(content)
    for one in () if container is None else container.values:
        if isinstance(one, list | tuple):
            yield one
        yield from _lists_in(one)


def _kind(value: Any) -> tuple[Any, ...]:
    """What the samples of a list have in common, and its fields as a rule do not."""
    if isinstance(value, Tensor | np.ndarray):
        return ("tensor", value.dtype, value.ndim)
    container = open_container(value)
    if container is None:
        return ("value", type(value))
    return ("record", type(value), container.places) if container.is_named else ("list", type(value))


def _kinds_in(values: Sequence[Any]) -> list[str]:
    """Whether each value is a tensor, a record, a list or something else."""
    return [_kind(one)[0] for one in values]


def _shared(value: Any) -> _Part:
    """A value that belongs to all samples."""
    return _Part(lambda _start, _stop: value, is_divided=False)


Cut = Callable[[Any, int, int], Any]


def _cut_of(value: Any) -> tuple[Cut | None, int]:
    """How a tensor, an array or packed sequences are cut, and for how many samples they are."""
    if isinstance(value, PackedSequence):
        return _cut_packed, int(value.batch_sizes[0])
    if isinstance(value, Tensor) and value.is_nested:
        return _cut_nested, value.size(0)
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
        return _cut_coo, value.shape[0]
    if isinstance(value, Tensor) and value.layout != torch.strided:
        is_plain = value.layout == torch.sparse_csr and value.ndim == 2
        return _cut_csr if is_plain else None, value.shape[0]
    return lambda rows, start, stop: rows[start:stop], len(value)


def _cut_packed(packed: PackedSequence, start: int, stop: int) -> PackedSequence:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    is_sorted = packed.sorted_indices is None
    return pack_padded_sequence(padded[start:stop], lengths[start:stop], batch_first=True, enforce_sorted=is_sorted)


def _cut_nested(nested: Tensor, start: int, stop: int) -> Tensor:
    return torch.nested.as_nested_tensor(list(nested.unbind()[start:stop]), layout=nested.layout)


def _cut_coo(sparse: Tensor, start: int, stop: int) -> Tensor:
    indices, values = sparse._indices(), sparse._values()
    inside = (indices[0] >= start) & (indices[0] < stop)
    indices = indices[:, inside]
    indices[0] -= start
    shape = (stop - start, *sparse.shape[1:])
    return torch.sparse_coo_tensor(
        indices, values[inside], shape, is_coalesced=sparse.is_coalesced(), check_invariants=False
    )


def _cut_csr(sparse: Tensor, start: int, stop: int) -> Tensor:
    rows = sparse.crow_indices()[start : stop + 1]
    first, last = int(rows[0]), int(rows[-1])
    columns, values = sparse.col_indices()[first:last], sparse.values()[first:last]
    shape = (stop - start, sparse.shape[1])
    return torch.sparse_csr_tensor(rows - first, columns, values, shape, check_invariants=False)
