"""Numbers that a loss function reads and the script changes between steps, such as a weight of a term.

The script may have computed them of one worker's samples, so workers compare them. Unlike a tensor, a number does not
show whether the loss follows from it: those count that the code of the loss function names.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
import types
from collections.abc import Iterator

from paceline.own_generators import reached_by
from paceline.parallel.kept.kept_values import FunctionNames, Places, name_in

_STEPS_TO_COMPARE = 3
"""In so many steps a number is compared that the script has changed before."""
_DEPTH = 3
_RECENT_S = 600.0


class ReadNumbers:
    """The numbers that one loss function reads."""

    def __init__(self, loss_fn: object, names: FunctionNames) -> None:
        in_code, places = set(_names_in(loss_fn)), names.places(_is_number, reads=True)
        self._places: Places = {path: place for path, place in places.items() if place[1] in in_code}
        self._steps_left = dict.fromkeys(self._places, _STEPS_TO_COMPARE)
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
        self._before = self._values()

    def _values(self) -> dict[str, float]:
        found = {path: place.get(name) for path, (place, name) in self._places.items()}
        return {path: float(value) for path, value in found.items() if _is_number(value) and _is_comparable(value)}


def _is_number(value: object) -> bool:
    """Whether it is one of Python's numbers or of NumPy's floating ones, which are some of these."""
    return isinstance(value, int | float)


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
