"""Numbers that a loss function or a model reads and the script changes between steps, such as a weight of a term.

The script may have computed them of one worker's samples, so workers compare them. Unlike a tensor, a number does not
show whether the loss follows from it: those count that the code of the loss function, or of a forward pass, names. So
do arrays of NumPy, and dictionaries of numbers by whole numbers, such as the weights of samples.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import nn

from paceline.own_generators import reached_by
from paceline.parallel.kept.kept_values import FunctionNames, Places, name_in, places_in_model

_STEPS_TO_COMPARE = 3
"""In so many steps a number is compared that the script has changed before."""
_STEPS_WITH_ALL = 8
_DEPTH = 3
_RECENT_S = 600.0


class ReadNumbers:
    """The numbers that one loss function, and the models of a run, read."""

    def __init__(self, loss_fn: object, names: FunctionNames, models: Iterable[nn.Module] = ()) -> None:
        in_code, places = set(_names_in(loss_fn)), names.places(_is_read, reads=True)
        self._places: Places = {path: place for path, place in places.items() if place[1] in in_code}
        self._of_models: Places = {}
        for number, model in enumerate(models):
            of_each_class = {type(module): module for module in model.modules()}.values()
            in_code = {name for module in of_each_class for name in _names_in(module, depth=1)}
            in_code -= {name for module in of_each_class for name in _names_set_by(module)}
            places = places_in_model(model, lambda value: _is_read(value) and type(value) is not bool)
            self._of_models |= {f"{number} {path}": place for path, place in places.items() if place[1] in in_code}
        self._num_steps = 0
        self._steps_left = dict.fromkeys(self._places | self._of_models, _STEPS_TO_COMPARE)
        self._before: dict[str, float] | None = None
        """Their values when the last step had ended; None: no step has."""
        self.changed: dict[str, float] = {}
        """The numbers that the script has changed since the last step, by name, as long as they are compared."""

    def begin_step(self) -> None:
        """Look at what the script has changed since `end_step`."""
        self.changed = {}
        if self._before is None:
            return
        for path, value in self._values().items():
            if self._steps_left[path] and value != self._before.get(path):
                self._steps_left[path] -= 1
                self.changed[name_in(path)] = value

    def end_step(self) -> None:
        """Whatever changes until `begin_step` is the script's doing."""
        self._num_steps += 1
        self._before = self._values()

    def _values(self) -> dict[str, float]:
        """The numbers now; those of models and tables, which are many, in the first steps and ever fewer later."""
        sees_all = self._num_steps <= _STEPS_WITH_ALL or self._num_steps.bit_count() == 1
        places = self._places | self._of_models if sees_all else self._places
        found = {path: place.get(name) for path, (place, name) in places.items() if self._steps_left[path]}
        values = {path: float(value) for path, value in found.items() if _is_number(value) and _is_comparable(value)}
        return values | {path: _sum(value) for path, value in found.items() if sees_all and _is_table(value)}


def _is_number(value: object) -> bool:
    """Whether it is one of Python's numbers or of NumPy's floating ones, which are some of these."""
    return isinstance(value, int | float)


def _is_table(value: object) -> bool:
    """Whether it is an array of numbers, or a dictionary of numbers by whole numbers."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "fiub" and value.size > 1
    return type(value) is dict and all(type(key) is int and _is_number(one) for key, one in value.items())


def _is_read(value: object) -> bool:
    return _is_number(value) or _is_table(value)


def _sum(table: np.ndarray[Any, Any] | dict[int, float]) -> float:
    """A number that moves with the values of a table."""
    values = np.nan_to_num(np.array(list(table.values())) if isinstance(table, dict) else table).astype(np.float64)
    return float(np.abs(values).sum() + values.sum() / 2 + values.max(initial=0.0))


def _is_comparable(value: float) -> bool:
    """Whether it is no NaN, and no recent time of a clock, by which a script says something now and then."""
    ages_s = (now - value for now in (time.time(), time.monotonic()) if value > _RECENT_S)
    return not math.isnan(value) and not any(0 <= age < _RECENT_S for age in ages_s)


def _names_in(function: object, depth: int = _DEPTH) -> Iterator[str]:
    """The names, and the keys, in the code of a function, and of the functions and methods that it names."""
    owners: list[object] = []
    while isinstance(function, functools.partial | types.MethodType):
        if isinstance(function, types.MethodType):
            owners.append(function.__self__)
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if not isinstance(function, types.FunctionType):
        owners.append(function)
        calls = [getattr(type(function), name, None) for name in ("forward", "__call__")]
        function = next((one for one in calls if isinstance(one, types.FunctionType)), None)
    if isinstance(function, types.FunctionType):
        names = list(_names_of(function.__code__))
        yield from names
        reached = list(reached_by(function)) if depth else []
        methods = [_method(owner, name) for owner in (*owners, *reached) for name in names] if depth else []
        for one in (*reached, *methods):
            if isinstance(one, types.FunctionType | types.MethodType | functools.partial):
                yield from _names_in(one, depth - 1)


def _names_set_by(module: nn.Module) -> Iterator[str]:
    """The attributes that a module's forward pass sets, as a loss for a log: what it sets is not the script's doing."""
    forward = getattr(type(module), "forward", None)
    for instruction in dis.get_instructions(forward) if isinstance(forward, types.FunctionType) else ():
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval


def _method(owner: object, name: str) -> types.MethodType | None:
    """The method of an object with this name, or the one behind a property; None if there is none."""
    found = inspect.getattr_static(type(owner), name, None)
    found = found.fget if isinstance(found, property) else found
    return types.MethodType(found, owner) if isinstance(found, types.FunctionType) else None


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names_of(constant)
