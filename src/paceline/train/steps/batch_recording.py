"""What a script computes from a batch between `run.batches` and `run.step`, recorded and computed again.

A worker has only its samples of a global batch. What the script makes of one sample must not follow from the others
there: which they are depends on the number of workers. So what it does is recorded as a list of calls of torch's
operators. They are made again with other samples in half of the batch: the other half has to stay as it was.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from paceline.containers import version
from paceline.parallel.kept.kept_tensors import written_arguments
from paceline.parallel.loss.coupling import TOLERANCE

_MOST_CALLS = 20_000
"""After so many calls of operators nothing more is recorded, and nothing is said."""
_LOW_PRECISION_TOLERANCE = 2e-2


@dataclass(frozen=True)
class _Computed:
    """A tensor that follows from the batch, by its number."""

    number: int


@dataclass(frozen=True)
class _Given:
    """A tensor that does not follow from the batch."""

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        if version(self.tensor) != self.version:
            raise _CannotRepeatError
        return self.tensor


@dataclass(frozen=True)
class _Call:
    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    """The numbers of the tensors among what it returns."""
    sizes: tuple[torch.Size | None, ...]
    """Their shapes."""
    written: frozenset[int]
    """The numbers of the tensors that it changes."""

    @cached_property
    def read(self) -> list[int]:
        """The numbers of the tensors that it gets."""
        return [one.number for one in tree_leaves((self.args, self.kwargs)) if isinstance(one, _Computed)]


class RowFinding(enum.Enum):
    """What rows of a tensor follow from besides their own samples and random numbers."""

    MIXES_SAMPLES = enum.auto()
    """Other samples."""
    SHARES_ROWS = enum.auto()
    """Other rows of random numbers that have as many rows as there are samples."""
    DIVIDES_DRAWS = enum.auto()
    """Random numbers of another shape, each row from others."""
    FOLLOWS_PLACE = enum.auto()
    """Random numbers for all samples, and something else that differs from row to row, such as its place."""


class _CannotRepeatError(Exception):
    """What was recorded cannot be computed again."""


class BatchRecording(TorchDispatchMode):
    """Records what is computed from the tensors of a batch, from now until `stop`."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run as they would: what they return counts as given."""
        return True

    def __init__(self, batch: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_recording = True
        self._calls: list[_Call] = []
        self._numbers: Any = WeakIdKeyDictionary()
        self._storages: list[int] = []
        """Where each numbered tensor has its values: tensors of one storage are views of each other."""
        self._starts: dict[int, Tensor] = {}
        """Copies of the tensors that nothing recorded computes, by number."""
        for tensor in filter(_is_plain, batch):
            self._starts[self._number(tensor)] = tensor.detach().clone()
        self._of_batch, self._rows = set(self._starts), set[int]()
        """The numbers of the batch's own tensors, and of random numbers that have a row for each of its samples."""
        self._drawn_for_all: dict[int, str] = {}
        """What draws random numbers of other shapes, by their number."""
        self._row_shape = next((one.shape[:1] for one in self._starts.values()), None)
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_entered = True

    def stop(self) -> None:
        """Record nothing more; under a mode that was entered later, this one stays behind without effect."""
        self._is_recording = False
        if self._is_entered and _get_current_dispatch_mode() is self:
            self._is_entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is recorded."""
        was_recording, self._is_recording = self._is_recording, False
        try:
            yield
        finally:
            self._is_recording = was_recording

    def take_drawn(self, drawn: Tensor, operator: str, *, of_rows: bool) -> None:
        """Take a tensor of random numbers, of any shape, as it is now: one row for each sample, or for all of them."""
        if not self._is_recording or not _is_plain(drawn):
            return
        number = self._take_as_given(drawn)
        if of_rows:
            self._rows.add(number)
        else:
            self._drawn_for_all[number] = operator

    def _number(self, tensor: Tensor) -> int:
        """A new number for a tensor."""
        number = len(self._storages)
        self._numbers[tensor] = number
        self._storages.append(tensor.untyped_storage().data_ptr())
        return number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if not self._is_recording or not any(one in self._numbers for one in given):
            return func(*args, **kwargs)
        if not _is_repeatable(func) or not all(map(_is_plain, given)):
            self.forget()
            return func(*args, **kwargs)
        written = [self._written(one) for one in written_arguments(func, args, kwargs)]
        noted_args, noted_kwargs = tree_map_only(Tensor, self._noted, (args, kwargs))
        returned = func(*args, **kwargs)
        results = tree_leaves(returned)
        if len(self._calls) == _MOST_CALLS or not all(_is_plain(one) for one in results if isinstance(one, Tensor)):
            self.forget()
        elif not written and _share_values(results, noted_args, noted_kwargs):
            pass  # a view of what was given, as of `expand_as`, follows from the batch in its shape alone
        elif torch.Tag.nondeterministic_seeded in func.tags:
            for one in results:
                if isinstance(one, Tensor):
                    self._take_as_given(one)
        else:
            numbers = tuple(map(self._result, results))
            sizes = tuple(map(_sizes, results))
            self._calls.append(_Call(func, noted_args, noted_kwargs, numbers, sizes, frozenset(written)))
        return returned

    def forget(self) -> None:
        """Hold no tensors any longer; nothing is known to mix samples from now on."""
        self._is_recording = False
        self._calls, self._starts = [], {}
        self._numbers = WeakIdKeyDictionary()

    def _written(self, tensor: Tensor) -> int:
        """The number of a tensor that is about to be changed; it follows from the batch from now on."""
        if tensor in self._numbers:
            return int(self._numbers[tensor])
        base = tensor._base
        if base is None or base.shape[:1] != self._row_shape or not _is_plain(base):
            self._starts[self._number(tensor)] = tensor.detach().clone()
        else:  # rows that a script fills one after the other
            place = (tensor.shape, tensor.stride(), tensor.storage_offset())
            args, written = (_Computed(self._written(base)), *place), self._number(tensor)
            self._calls.append(_Call(torch.ops.aten.as_strided.default, args, {}, (written,), place[:1], frozenset()))
        return int(self._numbers[tensor])

    def _noted(self, tensor: Tensor) -> _Computed | _Given:
        number = self._numbers.get(tensor)
        return _Given(tensor, version(tensor)) if number is None else _Computed(number)

    def _result(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        known = self._numbers.get(value)
        return self._number(value) if known is None else int(known)

    def _take_as_given(self, drawn: Tensor) -> int:
        """Take random numbers as they are, new or in a tensor that follows from the batch; return their number."""
        values = drawn.detach().clone()
        known = self._numbers.get(drawn)
        number = self._number(drawn if known is None else values)
        self._starts[number] = values
        if known is not None:
            copy, args = torch.ops.aten.copy_.default, (_Computed(int(known)), _Computed(number))
            self._calls.append(_Call(copy, args, {}, (int(known),), (_sizes(drawn),), frozenset((int(known),))))
        return number

    def found(self, outputs: Iterable[Tensor], num_samples: int) -> list[RowFinding | None]:
        """For each tensor that the script made, what its rows are computed from besides their own samples and numbers.

        Args:
            outputs: with a row for each sample, or without dimensions for what is of all samples; of what did not
                follow from the batch, or cannot be computed again, nothing is found.
            num_samples: the number of this worker's samples in the batch.
        """
        made = list(outputs)
        wanted = {int(self._numbers[one]): one for one in made if one in self._numbers}
        found: dict[int, RowFinding] = {}
        with contextlib.suppress(Exception), torch.no_grad():  # an operator that cannot be repeated, or compared
            # Torch does not see all that a script changes, as by `tensor.data` or an array of NumPy of the same memory.
            rows = self._differing(wanted, None, torch.arange(num_samples))
            known = {
                number: one
                for number, one in wanted.items()
                if not rows[number].any() and _is_of_samples(one, num_samples)
            }
            for kept in _halves(num_samples):
                for finding, exchanged in (
                    (RowFinding.MIXES_SAMPLES, self._of_batch),
                    (RowFinding.SHARES_ROWS, self._rows),
                ):
                    for number, rows_of in self._differing(known, exchanged, _repeating(num_samples, kept)).items():
                        if (rows_of[kept] if known[number].dim() else rows_of).any():
                            found.setdefault(number, finding)
            drawn = {number: one for number, one in known.items() if one.dim() and self._draws_for_all(number)}
            differing = self._differing_from_first(drawn, num_samples, levels_draws=False)
            divided = {number: drawn[number] for number, rows_of in differing.items() if rows_of.any()}
            for number, rows_of in self._differing_from_first(divided, num_samples, levels_draws=True).items():
                found.setdefault(number, RowFinding.FOLLOWS_PLACE if rows_of.any() else RowFinding.DIVIDES_DRAWS)
        return [found.get(int(self._numbers[one])) if one in self._numbers else None for one in made]

    def draws_for_all(self, output: Tensor) -> str:
        """What drew the random numbers of other shapes that a tensor follows from."""
        return ", ".join(sorted(self._draws_for_all(int(self._numbers[output]))))

    def _draws_for_all(self, number: int) -> set[str]:
        reached = self._reached({number})
        return {name for one, name in self._drawn_for_all.items() if one in reached}

    def _reached(self, wanted: set[int]) -> set[int]:
        """The numbers of the tensors that the wanted ones follow from, and theirs."""
        return wanted.union(*(call.read for call in self._needed(wanted)))

    def _differing(self, wanted: Mapping[int, Tensor], exchanged: set[int] | None, order: Tensor) -> dict[int, Tensor]:
        """Which rows of the wanted tensors become others where some tensors have their rows in another order.

        Args:
            exchanged: the numbers of the tensors that get other rows; if none leads to the wanted ones, nothing is
                computed again. None: nothing changes, and all is computed again.
        """
        if exchanged is not None and exchanged.isdisjoint(self._reached(set(wanted))):
            return {}
        now = self._with_rows(set(wanted), exchanged or set(), order)
        return {number: _differing_rows(wanted[number], one) for number, one in now.items()}

    def _differing_from_first(
        self, wanted: Mapping[int, Tensor], num_samples: int, *, levels_draws: bool
    ) -> dict[int, Tensor]:
        """Which rows of the wanted tensors are not the first one, where all samples are, and what was drawn for
        them."""
        order = torch.zeros(num_samples, dtype=torch.int64)
        now = self._with_rows(set(wanted), self._of_batch | self._rows, order, levels_draws=levels_draws)
        return {number: _differing_rows(one[:1].expand_as(one), one) for number, one in now.items()}

    def _with_rows(
        self, wanted: set[int], exchanged: set[int], order: Tensor, *, levels_draws: bool = False
    ) -> dict[int, Tensor]:
        """
        Args:
            levels_draws: whether what one operator draws for all samples becomes a single number.
        """
        calls = self._needed(wanted)
        values = self._copies_of_starts(calls, wanted)
        for number in exchanged.intersection(values):
            one = values[number]
            if one.dim() and len(one) == len(order):
                one.copy_(one[order.to(one.device)])
        if levels_draws:
            first: dict[str, Tensor] = {}
            for number in sorted(self._drawn_for_all.keys() & values.keys()):
                one = values[number]
                if one.numel():
                    one.fill_(first.setdefault(self._drawn_for_all[number], one.flatten()[0].clone()))
        values = self._repeat(values, calls, wanted)
        return {number: values[number] for number in wanted}

    def _copies_of_starts(self, calls: Sequence[_Call], wanted: Iterable[int]) -> dict[int, Tensor]:
        """Those that the wanted tensors follow from, by these calls."""
        needed = set(wanted).union(*(call.read for call in calls))
        return {number: tensor.clone() for number, tensor in self._starts.items() if number in needed}

    def _repeat(self, values: dict[int, Tensor], calls: Sequence[_Call], wanted: set[int]) -> dict[int, Tensor]:
        """The wanted tensors, by number, of recorded calls, which are made again.

        Args:
            values: those that nothing recorded computes; others are held for as long as they are of use.

        Raises:
            Exception: any, of an operator's, too.
        """

        def value(noted: _Computed | _Given) -> Tensor:
            return values[noted.number] if isinstance(noted, _Computed) else noted.value()

        uses = [{*call.read, *(number for number in call.results if number is not None)} - wanted for call in calls]
        last_use = {number: place for place, used in enumerate(uses) for number in used}
        for place, call in enumerate(calls):
            args, kwargs = tree_map_only((_Computed, _Given), value, (call.args, call.kwargs))
            if "_norm" in call.operator.__name__:  # some move running statistics and do not say so
                args = tree_map_only(Tensor, torch.clone, args)
            returned = tree_leaves(call.operator(*args, **kwargs))
            if tuple(map(_sizes, returned)) != call.sizes:
                raise _CannotRepeatError  # the script goes on by sizes that follow from values
            values |= {number: one for number, one in zip(call.results, returned, strict=True) if number is not None}
            del args, kwargs, returned
            for number in uses[place]:
                if last_use[number] == place:
                    del values[number]
        return values

    def _needed(self, wanted: set[int]) -> list[_Call]:
        """The calls whose results, or changes of tensors, the wanted tensors follow from."""
        numbers, storages, calls = set(wanted), {self._storages[number] for number in wanted}, []
        for call in reversed(self._calls):
            changes = {self._storages[number] for number in call.written}
            if numbers.isdisjoint(call.results) and storages.isdisjoint(changes):
                continue
            calls.append(call)
            numbers.update(call.read)
            storages.update(self._storages[number] for number in call.read)
        return calls[::-1]


def _is_repeatable(operator: Any) -> bool:
    """Not where other workers take part, where the host goes on by numbers in a tensor, as with packed sequences, or
    where a tensor gets the values of another, as by `copy.deepcopy`: they would be changed again."""
    is_known = isinstance(operator, OpOverload) and "c10d" not in operator.namespace
    return is_known and operator.overloadpacket not in (torch.ops.aten._pack_padded_sequence, torch.ops.aten.set_)


def _share_values(results: Iterable[Any], *arguments: Any) -> bool:
    """Whether one of the results is a view of an argument that does not follow from the batch, or that itself."""
    given = {one.tensor.untyped_storage().data_ptr() for one in tree_leaves(arguments) if isinstance(one, _Given)}
    return any(isinstance(one, Tensor) and one.untyped_storage().data_ptr() in given - {0} for one in results)


def _sizes(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested


def _halves(num_samples: int) -> list[Tensor]:
    """Two halves of the samples, by number: the first ones, and every other one; none of a single sample."""
    numbers = torch.arange(num_samples)
    return [numbers[: num_samples // 2], numbers[: num_samples // 2 * 2 : 2]] if num_samples > 1 else []


def _is_of_samples(tensor: Tensor, num_samples: int) -> bool:
    """Whether a tensor has a row for each sample, or is one number of them all."""
    return len(tensor) == num_samples if tensor.dim() else tensor.is_floating_point()


def _repeating(num_samples: int, kept: Tensor) -> Tensor:
    """The rows of a batch, of which those that are not kept are replaced by others that are, in turn."""
    order = torch.arange(num_samples)
    is_other = torch.ones(num_samples, dtype=torch.bool).index_fill(0, kept, False)
    order[is_other] = kept[torch.arange(int(is_other.sum())) % len(kept)]
    return order


def _differing_rows(before: Tensor, now: Tensor) -> Tensor:
    """Which rows, or whether a number, are not equal up to rounding; none of what cannot be compared."""
    length = len(before) if before.dim() else 1
    if before.shape != now.shape or before.dtype != now.dtype or not before.numel():
        return torch.zeros(length, dtype=torch.bool)
    if not (before.is_floating_point() or before.is_complex()):
        differ = before.long() != now.long()
    else:
        tolerance = TOLERANCE.get(before.dtype, _LOW_PRECISION_TOLERANCE)
        if before.dtype.itemsize == 1:  # float8 has no such operators
            before, now = before.float(), now.float()
        scale = float(before.detach().abs().nan_to_num().max())
        differ = ~torch.isclose(before.detach(), now, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    return differ.reshape(length, -1).any(1).cpu()
