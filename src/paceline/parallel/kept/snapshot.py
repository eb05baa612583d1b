"""What a loss function and a model keep from call to call, given back after calls that are to count for nothing.

Before its first step a loss function is called to see how it behaves (`parallel.shards.examination`). A metric that it
updates would count those calls, and a value that it makes in its first call would be made of another worker's samples.
"""

from __future__ import annotations

import copy
import math
import operator
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.containers import version
from paceline.parallel.kept.kept_values import (
    OF_EVERY_MODULE,
    KeptNames,
    Namespace,
    is_counted,
    namespaces_in_function,
    namespaces_in_model,
    package_of,
)

_MOST_BYTES = 16 * 2**20
"""A larger tensor is rather data than a metric: there is no copy of it, and what calls write into it stays."""
_MOST_BYTES_IN_ALL = 256 * 2**20
_MOST_BYTES_IN_STEP = 2**20
"""Every step takes a snapshot of what calls change if it is no larger: a metric, and not a model's last activations."""
_MOST_IN_CONTAINER = 1024
"""A larger one is rather data or a vocabulary, and is not looked through."""
_DEPTH = 3
"""The depth of nested containers that are looked at."""

_Key = tuple[int, Any]
_Mutable = list[Any] | deque[Any] | dict[Any, Any] | set[Any]


class KeptState:
    """Where a loss function and the models that it calls keep values outside of parameters and buffers."""

    def __init__(self, loss_fn: object, models: Iterable[nn.Module]) -> None:
        """
        Args:
            models: the models of the run: what they hold in parameters and buffers is looked after elsewhere.
        """
        self._loss_fn = loss_fn
        self._models = tuple(models)
        self._changing: dict[_Key, KeptNames] = {}
        """The single names whose values calls have changed, as far as snapshots have shown."""
        self._namespaces: dict[int, Namespace] = {}
        """The namespaces found, by `id`: `Counters` changes the numbers in them."""

    def snapshot_of_changing(self) -> KeptSnapshot:
        """The small ones of those that calls have been seen to change."""
        small = [one for one in self._changing.values() if _num_bytes(one.value) <= _MOST_BYTES_IN_STEP]
        return KeptSnapshot(small, self._namespaces, self._note)

    @contextmanager
    def unchanged(self) -> Iterator[KeptSnapshot]:
        """A context after which everything is as before, and what that is."""
        found = list(self._all())
        self._namespaces = {id(one.place): one.place for one in found}
        before = KeptSnapshot(found, self._namespaces, self._note)
        try:
            yield before
        finally:
            before.restore()

    def _all(self) -> Iterator[KeptNames]:
        of_models: set[int] = set()
        for model in self._models:
            of_norms: set[int] = set()  # what our own batch norm keeps of a step
            for module in model.modules():
                of_models.update((id(vars(module)), id(module._parameters), id(module._buffers)))
                if type(module).__module__.startswith("paceline.parallel."):
                    inner = (vars(value) for value in vars(module).values() if hasattr(value, "__dict__"))
                    of_norms.update(map(id, (vars(module), *vars(module).values(), *inner)))
            yield from (found for _, found in namespaces_in_model(model) if id(found.place) not in of_norms)
        if package_of(self._loss_fn) == "paceline":  # our own keep nothing
            return
        for found in namespaces_in_function(self._loss_fn):
            if id(found.place) not in of_models:
                yield found

    def _note(self, one: KeptNames) -> None:
        self._changing[_key(one)] = one


NOTHING_KEPT = KeptState(None, ())


class KeptSnapshot:
    """The values of some names at one moment."""

    def __init__(
        self, found: Sequence[KeptNames], namespaces: Container[int], note: Callable[[KeptNames], None]
    ) -> None:
        """
        Args:
            namespaces: the ids of those whose numbers `Counters` moves.
            note: called with each name whose value is another one when `restore` is called.
        """
        self._found = found
        self._namespaces = namespaces
        self._note = note
        self._bytes_left = _MOST_BYTES_IN_ALL
        self._seen: set[int] = set()
        self._saved: dict[_Key, _Saved] = {}
        for one in _singles(found):
            if _key(one) not in self._saved:
                self._saved[_key(one)] = saved = _Saved(one, one.value)
                self._save(one.value, saved, _DEPTH)

    def made(self) -> list[str]:
        """The names that have a value now and had none, or were False."""
        return [*dict.fromkeys(str(one.only) for one in _singles(self._found) if self._is_made(one))]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the values back, but for numbers, which `Counters` moves."""
        for one in {_key(one): one for one in _singles(self._found) if _key(one) not in self._saved}.values():
            self._note(one)
            del one.place[one.only]
        for saved in self._saved.values():
            if not saved.is_same():
                self._note(saved.name)
                saved.give_back()

    def _is_made(self, one: KeptNames) -> bool:
        saved = self._saved.get(_key(one))
        had_value = saved is not None and saved.value is not None and saved.value is not False
        return not had_value and one.value is not None and one.value is not False

    def _save(self, value: Any, saved: _Saved, depth: int) -> None:
        if id(value) in self._seen or not depth:
            return
        if isinstance(value, Tensor | np.ndarray) and not isinstance(value, nn.Parameter):
            self._seen.add(id(value))
            is_plain = isinstance(value, np.ndarray) or value.layout == torch.strided
            if is_plain and value.nbytes <= min(_MOST_BYTES, self._bytes_left):
                self._bytes_left -= value.nbytes
                if isinstance(value, Tensor):
                    saved.tensors.append((value, version(value), value.detach().clone()))
                else:
                    saved.arrays.append((value, value.copy()))
        elif isinstance(value, list | deque | dict | set | tuple) and len(value) <= _MOST_IN_CONTAINER:
            self._seen.add(id(value))
            if not isinstance(value, tuple):
                saved.containers.append(_SavedContainer(value, copy.copy(value), id(value) in self._namespaces))
            for one in list(value.values() if isinstance(value, dict) else value):
                self._save(one, saved, depth - 1)


@dataclass
class _SavedContainer:
    """A list, dictionary or set."""

    now: _Mutable
    copied: Any
    is_namespace: bool
    """Whether its numbers are left to `Counters`."""

    def is_same(self) -> bool:
        """Whether the same objects are in it as before."""
        now, before = self.now, self._before()
        if isinstance(now, set):
            return bool(now == before)
        if isinstance(now, dict):
            now, before = [*now.keys(), *now.values()], [*before.keys(), *before.values()]
        return len(now) == len(before) and all(map(operator.is_, now, before))

    def give_back(self) -> None:
        if not self.is_same():
            before = self._before()
            self.now.clear()
            self.now.extend(before) if isinstance(self.now, list | deque) else self.now.update(before)

    def _before(self) -> Any:
        """What it held, with the numbers that it holds now."""
        if not self.is_namespace or not isinstance(self.now, dict):
            return self.copied
        return {
            name: self.now[name] if is_counted(before) and is_counted(self.now.get(name)) else before
            for name, before in self.copied.items()
        }


@dataclass
class _Saved:
    """The value of a name."""

    name: KeptNames
    value: Any
    containers: list[_SavedContainer] = field(default_factory=list)
    """The containers in it."""
    tensors: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)
    """The tensors in it, how often each was changed, and a copy."""
    arrays: list[tuple[Any, Any]] = field(default_factory=list)
    """NumPy's arrays in it, and copies."""

    def is_same(self) -> bool:
        if is_counted(self.value):
            return True
        return (
            self.name.value is self.value
            and all(container.is_same() for container in self.containers)
            and all(version(tensor) == before for tensor, before, _ in self.tensors)
            and all(array.tobytes() == before.tobytes() for array, before in self.arrays)
        )

    def give_back(self) -> None:
        if self.name.value is not self.value:
            self.name.place[self.name.only] = self.value
        for container in self.containers:
            container.give_back()
        for tensor, changes, before in self.tensors:
            if version(tensor) != changes and tensor.shape == before.shape:
                tensor.detach().copy_(before)
        for array, before in self.arrays:
            if array.tobytes() != before.tobytes():
                np.copyto(array, before)


def _singles(found: Iterable[KeptNames]) -> Iterator[KeptNames]:
    """Each name that is there by itself, but for those that every module has."""
    for names in found:
        present = [name for name, _ in names.items() if name not in OF_EVERY_MODULE and name in names.place]
        if len(present) <= _MOST_IN_CONTAINER:
            yield from (KeptNames(names.place, name) for name in present)


def _key(one: KeptNames) -> _Key:
    return id(one.place), one.only


def _num_bytes(value: Any) -> float:
    """The size of the tensors in a value; infinite for a large container."""
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes
    if not isinstance(value, list | deque | dict | set | tuple):
        return 0
    if len(value) > _MOST_IN_CONTAINER:
        return math.inf
    return sum(map(_num_bytes, value.values() if isinstance(value, dict) else value))
