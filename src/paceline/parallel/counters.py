"""Numbers that a model or a loss function keeps from call to call: counters of steps, rates that fall with them.

How many passes a step takes depends on the number of workers, so every pass begins with the numbers of the step: a step
moves them once, by what a pass makes of them. That is the same on all workers where it does not depend on samples; a
number that the passes of a step move differently, such as a sum of losses, is the program's own.
"""

from __future__ import annotations

import dis
import functools
import math
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from paceline.own_generators import reached_by
from paceline.parallel.losses import LossOf

_STEPS_TO_LOOK = 2
"""After so many steps only numbers beside one that has changed are watched, since a large model has thousands. They may
follow later, as a rate that falls every hundred steps does."""
_FEW = 64
"""So many are watched in any case."""
_DEPTH = 4
"""How far from a loss function its numbers are looked for."""


class _Place(Protocol):
    """Where numbers are kept, by name."""

    def get(self, name: str, /) -> Any: ...

    def __setitem__(self, name: str, value: Any, /) -> None: ...


@dataclass
class _Number:
    path: str
    """Names it, alike in every run of the program."""
    place: _Place
    name: str
    before: Any
    """Its value before the step."""
    moves: list[float]
    """By how much each pass of the step moved it."""
    last_move: float = 0
    """By how much the last step with a pass moved it."""
    has_moved: bool = False
    """Whether any pass has moved it."""

    @property
    def now(self) -> Any:
        return self.place.get(self.name)

    @property
    def is_counter(self) -> bool:
        """Whether all passes of the step moved it alike."""
        return all(math.isclose(move, self.moves[0], rel_tol=1e-9) for move in self.moves)


class Counters:
    """Some numbers that forward passes change."""

    def __init__(self, places: Mapping[str, tuple[_Place, str]]) -> None:
        """
        Args:
            places: where they are, by path.
        """
        self._watched = [_Number(path, place, name, place.get(name), []) for path, (place, name) in places.items()]
        self._steps_to_look = _STEPS_TO_LOOK
        self._is_passing = False
        self._has_passed = False
        self._lock = threading.Lock()

    @classmethod
    def of_model(cls, model: nn.Module) -> Counters:
        return cls(
            {
                f"{path}.{name}" if path else name: (place, name)
                for path, module in model.named_modules()
                for place, name in _numbers_in(vars(module))
            }
        )

    @classmethod
    def of_function(cls, loss_fn: object) -> Counters:
        """Those of a loss function: in variables that it assigns to, and in attributes and dictionaries that it names.

        What belongs to other packages counts only in modules: a loss of another library.
        """
        found = {(id(place), name): (place, name) for place, name in _numbers_of(loss_fn)}
        return cls({f"{number} {name}": (place, name) for number, (place, name) in enumerate(found.values())})

    def begin_step(self) -> None:
        self._has_passed = self._is_passing = False
        for number in self._watched:
            number.before, number.moves = number.now, []

    def begin_pass(self) -> None:
        self._end_pass()
        self.restore()
        self._has_passed = self._is_passing = True

    def around(self, loss_of: LossOf) -> LossOf:
        """A loss function of which every call is a pass."""
        if not self._watched:
            return loss_of

        def counted(model: nn.Module, content: Any) -> Any:
            # Replicas in one process call it from several threads.
            may_move = self._steps_to_look or any(number.last_move for number in self._watched)
            with self._lock if may_move else nullcontext():
                self.begin_pass()
                try:
                    return loss_of(model, content)
                except BaseException:  # a pipeline stops it where it calls the model, and calls it again
                    self.restore()
                    raise

        return counted

    def restore(self) -> None:
        """Give the numbers their values before the step again."""
        self._is_passing = False
        for number in self._watched:
            if number.now is not None:  # it was not deleted
                number.place[number.name] = number.before

    def end_step(self) -> None:
        """Move the numbers of a worker that made no pass in this step as the others' passes did."""
        self._end_pass()
        for number in self._watched:
            if number.moves:
                number.last_move = number.moves[-1]
            elif not self._has_passed and number.last_move:
                number.place[number.name] = number.before + number.last_move
        if self._steps_to_look and self._has_passed:
            self._steps_to_look -= 1
            if not self._steps_to_look and len(self._watched) > _FEW:
                moving = {id(number.place) for number in self._watched if number.has_moved}
                self._watched = [number for number in self._watched if id(number.place) in moving]

    def let_stand(self) -> None:
        """Begin the next pass with what the last one has made of the numbers."""
        self._end_pass()
        self.begin_step()

    def state(self) -> dict[str, float]:
        """The numbers that passes have moved, by path: a resumed run goes on from them."""
        return {number.path: number.now for number in self._watched if number.has_moved}

    def load_state(self, state: Mapping[str, float]) -> None:
        for number in self._watched:
            if number.path in state:
                number.place[number.name], number.has_moved = state[number.path], True

    def _end_pass(self) -> None:
        """Note what the pass made of the numbers; those that are no counters are left to the program from now on."""
        if not self._is_passing:
            return
        self._is_passing = False
        for number in self._watched:
            if type(number.now) is type(number.before) and type(number.before) in (int, float):
                number.moves.append(number.now - number.before)
                number.has_moved |= number.now != number.before
                if not number.is_counter:
                    number.place[number.name] = number.before + sum(number.moves)
        self._watched = [number for number in self._watched if number.is_counter]


def _numbers_in(attributes: dict[Any, Any]) -> Iterator[tuple[_Place, str]]:
    return ((attributes, name) for name, value in attributes.items() if type(value) in (int, float))


def _numbers_of(loss_fn: object) -> Iterator[tuple[_Place, str]]:
    package, seen, left = _package(loss_fn), set(), [(loss_fn, _DEPTH)]
    while left:
        thing, depth = left.pop()
        if id(thing) in seen or isinstance(thing, type | types.ModuleType) or not depth:
            continue
        seen.add(id(thing))
        if isinstance(thing, functools.partial):
            left += [(part, depth) for part in (thing.func, *thing.args, *thing.keywords.values())]
        elif isinstance(thing, types.MethodType):
            left += [(thing.__self__, depth), (thing.__func__, depth)]
        elif isinstance(thing, dict):
            yield from _numbers_in(thing)
        elif isinstance(thing, nn.Module):
            for module in thing.modules():
                yield from _numbers_in(vars(module))
        elif _package(thing) == package and hasattr(thing, "__dict__"):
            yield from _numbers_in(vars(thing))
            if isinstance(thing, types.FunctionType):
                yield from _assigned_by(thing)
                parts = reached_by(thing)
            else:
                parts = iter((*vars(thing).values(), vars(type(thing)).get("__call__")))
            left += [(part, depth - 1) for part in parts]


def _package(thing: object) -> str:
    """The name of the package that a function, or the class of an object, belongs to."""
    while isinstance(thing, functools.partial | types.MethodType):
        thing = thing.func if isinstance(thing, functools.partial) else thing.__self__
    owner = thing if isinstance(thing, types.FunctionType | type) else type(thing)
    return str(owner.__module__).partition(".")[0]


def _assigned_by(function: types.FunctionType) -> Iterator[tuple[_Place, str]]:
    """The global variables and those of functions around it that a function assigns numbers to."""
    cells = _Cells(dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)))
    for instruction in dis.get_instructions(function):
        place: _Place = cells if instruction.opname == "STORE_DEREF" else function.__globals__
        is_assigned = instruction.opname in ("STORE_DEREF", "STORE_GLOBAL")
        if is_assigned and type(place.get(instruction.argval)) in (int, float):
            yield place, instruction.argval


@dataclass
class _Cells:
    """Variables of the functions around a function."""

    cells: dict[str, types.CellType]

    def get(self, name: str) -> Any:
        try:
            return self.cells[name].cell_contents if name in self.cells else None
        except ValueError:  # not assigned yet
            return None

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value
