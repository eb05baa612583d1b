"""What a script computes from a batch between `run.batches` and `run.step`, recorded and computed again.

A worker has only its samples of a global batch. What the script makes of one sample must not follow from the others
there: which they are depends on the number of workers. So what it does is recorded as a list of calls of torch's
operators. They are made again with other samples in the second half of the batch: the first half has to stay as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

_MOST_CALLS = 20_000
"""After so many calls of operators nothing more is recorded, and nothing is said."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
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
        if _version(self.tensor) != self.version:
            raise _CannotRepeatError
        return self.tensor


@dataclass(frozen=True)
class _Call:
    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    """The numbers of the tensors among what it returns."""
    written: frozenset[int]
    """The numbers of the tensors that it changes."""


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
        self._num_in_batch = len(batch)
        for tensor in batch:
            self._starts[self._number(tensor)] = tensor.detach().clone()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Record nothing more; under a mode that was entered later, this one stays behind without effect."""
        self._is_recording = False
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

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
        if not self._is_recording or not any(self._follows(one) for one in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        is_plain = isinstance(func, OpOverload) and all(one in (Tensor, nn.Parameter) for one in types)
        if not is_plain or "c10d" in func.namespace:
            self.forget()  # tensors of other kinds, or other workers' values
            return func(*args, **kwargs)
        written = [self._written(one) for one in _written_arguments(func, args, kwargs)]
        noted_args, noted_kwargs = tree_map_only(Tensor, self._noted, (args, kwargs))
        returned = func(*args, **kwargs)
        is_draw = torch.Tag.nondeterministic_seeded in func.tags
        for one in tree_leaves(returned) if is_draw else ():
            self._take_as_given(one)
        if not is_draw:
            numbers = tuple(self._result(one) for one in tree_leaves(returned))
            self._calls.append(_Call(func, noted_args, noted_kwargs, numbers, frozenset(written)))
        if len(self._calls) > _MOST_CALLS:
            self.forget()
        return returned

    def _follows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value in self._numbers

    def forget(self) -> None:
        """Hold no tensors any longer; nothing is known to mix samples from now on."""
        self._is_recording = False
        self._calls, self._starts = [], {}
        self._numbers = WeakIdKeyDictionary()

    def _written(self, tensor: Tensor) -> int:
        """The number of a tensor that is about to be changed; it follows from the batch from now on."""
        if tensor not in self._numbers:
            self._starts[self._number(tensor)] = tensor.detach().clone()
        return int(self._numbers[tensor])

    def _noted(self, tensor: Tensor) -> _Computed | _Given:
        number = self._numbers.get(tensor)
        return _Given(tensor, _version(tensor)) if number is None else _Computed(number)

    def _result(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        known = self._numbers.get(value)
        return self._number(value) if known is None else int(known)

    def _take_as_given(self, drawn: Any) -> None:
        """Take random numbers as they are, new or in a tensor that follows from the batch."""
        if not isinstance(drawn, Tensor):
            return
        values = drawn.detach().clone()
        number = self._numbers.get(drawn)
        if number is None:
            self._starts[self._number(drawn)] = values
        else:
            copy, args = torch.ops.aten.copy_.default, (_Computed(number), _Given(values, _version(values)))
            self._calls.append(_Call(copy, args, {}, (number,), frozenset((number,))))

    def mixes_samples(self, outputs: Iterable[Tensor], num_samples: int) -> list[bool]:
        """Of each tensor that the script made, whether its rows follow from other samples than their own.

        Args:
            outputs: with a row for each sample, or without dimensions for what is of all samples; what did not follow
                from the batch, or cannot be computed again, mixes nothing.
            num_samples: those of the batch, this worker's.
        """
        made = list(outputs)
        wanted = {int(self._numbers[one]): one for one in made if one in self._numbers}
        if not wanted:
            return [False] * len(made)
        half = num_samples // 2
        batch = {number: self._starts[number] for number in range(self._num_in_batch)}
        changed = {
            number: _with_other_second_half(tensor, half)
            for number, tensor in batch.items()
            if half and _has_rows(tensor, num_samples)
        }
        if not changed:
            return [False] * len(made)
        values = {number: tensor.clone() for number, tensor in self._starts.items()}
        values |= changed
        try:
            with torch.no_grad():
                self._repeat(values, set(wanted))
        except (_CannotRepeatError, RuntimeError, IndexError, NotImplementedError):
            return [False] * len(made)
        mixed = {
            number: not _is_same(before[:half], values[number][:half])
            if _has_rows(before, num_samples)
            else before.dim() == 0 and before.is_floating_point() and not _is_same(before, values[number])
            for number, before in wanted.items()
        }
        return [one in self._numbers and mixed[int(self._numbers[one])] for one in made]

    def _repeat(self, values: dict[int, Tensor], wanted: set[int]) -> None:
        """Make the recorded calls again that the wanted tensors follow from; `values` gets what they return."""

        def value(noted: _Computed | _Given) -> Tensor:
            return values[noted.number] if isinstance(noted, _Computed) else noted.value()

        for call in self._needed(wanted):
            args, kwargs = tree_map_only((_Computed, _Given), value, (call.args, call.kwargs))
            if "batch_norm" in call.operator.__name__:  # which moves running statistics and does not say so
                args = tree_map_only(Tensor, torch.clone, args)
            returned = tree_leaves(call.operator(*args, **kwargs))
            values |= {number: one for number, one in zip(call.results, returned, strict=True) if number is not None}

    def _needed(self, wanted: set[int]) -> list[_Call]:
        """The calls whose results, or changes of tensors, the wanted tensors follow from."""
        numbers, storages, calls = set(wanted), {self._storages[number] for number in wanted}, []
        for call in reversed(self._calls):
            changes = {self._storages[number] for number in call.written}
            if numbers.isdisjoint(call.results) and storages.isdisjoint(changes):
                continue
            calls.append(call)
            read = [one.number for one in tree_leaves((call.args, call.kwargs)) if isinstance(one, _Computed)]
            numbers.update(read)
            storages.update(self._storages[number] for number in read)
        return calls[::-1]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _written_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call of an operator changes."""
    if not operator._schema.is_mutable:
        return []
    arguments = operator._schema.arguments
    given = {one.name: value for one, value in zip(arguments, args, strict=False)} | kwargs
    written = [given.get(one.name) for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return [one for one in tree_leaves(written) if isinstance(one, Tensor)]


def _has_rows(tensor: Tensor, num_samples: int) -> bool:
    return tensor.dim() > 0 and len(tensor) == num_samples


def _with_other_second_half(tensor: Tensor, half: int) -> Tensor:
    """A batch of which the second half has the samples of the first."""
    return tensor[torch.arange(len(tensor), device=tensor.device) % half]


def _is_same(before: Tensor, now: Tensor) -> bool:
    if before.shape != now.shape or before.dtype != now.dtype:
        return True  # what has other sizes cannot be compared
    if not (before.is_floating_point() or before.is_complex()):
        return torch.equal(before, now)
    tolerance = _TOLERANCE.get(before.dtype, _LOW_PRECISION_TOLERANCE)
    scale = float(before.detach().abs().nan_to_num().max()) if before.numel() else 0.0
    return torch.allclose(before.detach(), now, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
