"""The samples of a batch: which parts of its content belong to one sample each, and the content of some of them.

A tensor or a NumPy array has a row for each sample; a list or a tuple that is no container of fields has an entry for
each. Numbers, texts, None and tensors without dimensions belong to all samples. Whatever else there is cannot be
divided, and is refused by its place in the batch, before anything is computed.
"""

from __future__ import annotations

import enum
import numbers
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from paceline.containers import Container, open_container
from paceline.errors import ModelError
from paceline.sharded_batch import ShardedBatch

_SHARED = (str, bytes, numbers.Number, np.generic, enum.Enum, torch.dtype, torch.device, type(None))

_ROWS = (Tensor, np.ndarray, PackedSequence)

Readings = dict[str, bool]
"""Places of lists and tuples in the batches of a run, and whether the values there are fields rather than samples."""


class Samples:
    """The content of a batch, which can be cut along its samples."""

    def __init__(self, content: Any, readings: Readings, first: int = 0) -> None:
        self._content = content
        self._readings = readings
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
            return cls(content, {})
        readings = {} if readings is None else readings
        reader = _Reader(num_samples, readings, collated)
        reader.is_divided(content, "batch")
        if num_samples > 1:
            readings |= reader.found
        return cls(content, reader.found)

    def cut(self, start: int, stop: int) -> Any:
        """The content for the samples start … stop - 1: views of the same tensors, in containers of the same types."""
        if isinstance(self._content, ShardedBatch):
            return self._content.beginning_at(self._first + start)
        return self._cut(self._content, "batch", self._first + start, self._first + stop)

    def beyond(self, start: int) -> Samples:
        """The samples from `start` on."""
        return Samples(self._content, self._readings, start)

    def _cut(self, value: Any, place: str, start: int, stop: int) -> Any:
        if isinstance(value, _ROWS):
            return value if _has_no_rows(value) else _rows(value, start, stop)
        container = None if isinstance(value, _SHARED) else open_container(value)
        if container is None:
            return value
        if self._readings.get(place) is False:
            return container.make(value[start:stop])
        values = [
            self._cut(one, place + where, start, stop)
            for one, where in zip(container.values, container.places, strict=True)
        ]
        return value if all(map(operator.is_, values, container.values)) else container.make(values)


class _Reader:
    """Reads the content of a batch of a number of samples."""

    def __init__(self, num_samples: int, before: Readings, collated: Any) -> None:
        self._num_samples = num_samples
        self._before = before
        self._collated = collated
        self.found: Readings = {}

    def is_divided(self, value: Any, place: str) -> bool:
        """Whether something in a value belongs to single samples. Raises ModelError where it cannot be cut."""
        if isinstance(value, _SHARED):
            return False
        if isinstance(value, _ROWS):
            return self._has_rows(value, place)
        container = open_container(value)
        if container is None:
            raise self._refused(place, value, "which cannot be cut into samples")
        if isinstance(value, list | tuple) and not container.is_named and value:
            return self._read_list(value, container, place)
        return self._read_fields(value, container, place)

    def _has_rows(self, value: Any, place: str) -> bool:
        if _has_no_rows(value):
            return False
        num_rows = _num_rows(value)
        if num_rows is None:
            raise self._refused(place, value, f"whose layout {value.layout} cannot be cut exactly")
        if num_rows != self._num_samples:
            is_ragged = isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_nested)
            shape = f"{num_rows} rows" if is_ragged else f"shape {tuple(value.shape)}"
            raise ModelError(
                f"The batch given to run.step has in {place} a {type(value).__name__} of {shape} for "
                f"{self._num_samples} samples; each tensor in it needs one row for every sample that run.batches "
                "yielded, in their order."
            )
        return True

    def _read_fields(self, value: Any, container: Container, place: str) -> bool:
        """Each value of a container is cut by itself."""
        pairs = zip(container.values, container.places, strict=True)
        is_divided = True in [self.is_divided(one, place + where) for one, where in pairs]  # all of them are read
        if is_divided and type(value) not in (dict, list, tuple):
            try:
                made = open_container(container.make(container.values))
            except Exception as problem:
                raise self._refused(place, value, f"which cannot be made again ({problem})") from None
            if made is None or made.places != container.places:
                raise self._refused(place, value, "which is not the same when it is made again")
        return is_divided

    def _read_list(self, value: Any, container: Container, place: str) -> bool:
        """A list or tuple: of fields, or of one entry for each sample."""
        problem: ModelError | None = None
        may_be_fields = False
        try:
            may_be_fields = self._read_fields(value, container, place)
        except ModelError as error:
            problem = error
        may_be_samples = len(value) == self._num_samples
        if not (may_be_fields or may_be_samples):
            if problem is not None and any(
                open_container(one) or isinstance(one, Tensor | np.ndarray) for one in value
            ):
                raise problem
            raise self._refused(place, value, f"which has {len(value)} entries for {self._num_samples} samples")
        self.found[place] = may_be_fields and (not may_be_samples or self._are_fields(value, place))
        return True

    def _are_fields(self, value: Sequence[Any], place: str) -> bool:
        """Whether a list that could be both holds fields."""
        known = self._before.get(place)
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


def _has_no_rows(value: Any) -> bool:
    return not isinstance(value, PackedSequence) and value.ndim == 0


def _num_rows(value: Any) -> int | None:
    """For how many samples a tensor, an array or packed sequences are; None where they cannot be cut exactly."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, Tensor) and not value.is_nested and value.layout not in (torch.strided, torch.sparse_coo):
        return value.shape[0] if value.layout == torch.sparse_csr and value.ndim == 2 else None
    return value.size(0) if isinstance(value, Tensor) else len(value)


def _rows(value: Any, start: int, stop: int) -> Any:
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        is_sorted = value.sorted_indices is None
        return pack_padded_sequence(padded[start:stop], lengths[start:stop], batch_first=True, enforce_sorted=is_sorted)
    if isinstance(value, Tensor) and value.is_nested:
        return torch.nested.as_nested_tensor(list(value.unbind()[start:stop]), layout=value.layout)
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
        return torch.narrow_copy(value, 0, start, stop - start)
    if isinstance(value, Tensor) and value.layout == torch.sparse_csr:
        return torch.narrow_copy(value.to_sparse_coo(), 0, start, stop - start).to_sparse_csr()
    return value[start:stop]
