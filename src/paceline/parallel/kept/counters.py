"""Numbers that a model or a loss function keeps from call to call: counters of steps, rates that fall with them.

How many passes a step takes depends on the number of workers, so every pass begins with the numbers of the step: a step
moves them once, by what a pass makes of them. That is the same on all workers where it does not depend on samples; a
number that the passes of a step move differently, such as a sum of losses, is the program's own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.parallel.kept.kept_values import FunctionNames, Namespace, Places, is_counted, places_in_model
from paceline.parallel.losses import LossOf

_STEPS_TO_LOOK = 2
"""After this many steps, only numbers of objects in which some number has changed are watched, since a large model has
thousands. The others there may change later, such as a rate that falls every hundred steps."""
_FEW = 64
"""Up to this many numbers, all are watched."""


@dataclass
class _Number:
    path: str
    """Its path, the same in every run of the program."""
    place: Namespace
    name: str
    before: Any
    """Its value before the step."""
    moves: list[float]
    """The change by each pass of the step."""
    last_move: float = 0
    """The change by the last step that had a pass on this worker."""
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

    def __init__(self, places: Places) -> None:
        self._watched = [_Number(path, place, name, place.get(name), []) for path, (place, name) in places.items()]
        for number in self._watched:  # what only the class has becomes the object's own, as by the first change
            number.place[number.name] = number.before
        self._steps_to_look = _STEPS_TO_LOOK
        self._is_passing = False
        self._has_passed = False
        self._lock = threading.Lock()

    @classmethod
    def of_model(cls, model: nn.Module) -> Counters:
        return cls(places_in_model(model, is_counted))

    @classmethod
    def of_function(cls, names: FunctionNames) -> Counters:
        return cls(names.places(is_counted))

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
        """Use the values left by the last pass as the starting values of the next."""
        self._end_pass()
        self.begin_step()

    @contextmanager
    def as_in_next_step(self) -> Iterator[None]:
        """A context in which passes start from the values left by the last pass."""
        has_passed, before = self._has_passed, [(number, number.before, number.moves) for number in self._watched]
        self.let_stand()
        try:
            yield
        finally:
            for number, value, moves in before:
                number.before, number.moves = value, moves
            self.restore()
            self._has_passed = has_passed

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
            if type(number.now) is type(number.before) and is_counted(number.before):
                number.moves.append(number.now - number.before)
                number.has_moved |= number.now != number.before
                if not number.is_counter:
                    number.place[number.name] = number.before + sum(number.moves)
        self._watched = [number for number in self._watched if number.is_counter]
