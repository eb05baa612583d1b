"""Numbers in attributes of a model that its forward passes change: counters of steps, rates that fall with them.

How many passes a step takes depends on the number of workers, so every pass begins with the numbers of the step: a step
moves them once, by what a pass makes of them. That is the same on all workers where it does not depend on samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_STEPS_TO_LOOK = 2
"""After so many steps only modules in which a number has changed are watched, since a large model has thousands; others
of theirs may follow later, as a rate that falls every hundred steps."""


@dataclass
class _Number:
    path: str
    """The name of its module in the model, and its own."""
    attributes: dict[str, Any]
    """Those of its module."""
    name: str
    before: Any
    """Its value before the step."""
    last_move: float = 0
    """By how much the last step with a pass moved it."""
    has_moved: bool = False
    """Whether any pass has moved it."""

    @property
    def now(self) -> Any:
        return self.attributes.get(self.name)


class Counters:
    """The numbers of a model that its forward passes change."""

    def __init__(self, model: nn.Module) -> None:
        self._watched = [
            _Number(f"{path}.{name}" if path else name, vars(module), name, value)
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if type(value) in (int, float)
        ]
        self._steps_to_look = _STEPS_TO_LOOK
        self._has_passed = False

    def begin_step(self) -> None:
        self._has_passed = False
        for number in self._watched:
            number.before = number.now

    def begin_pass(self) -> None:
        self.restore()
        self._has_passed = True

    def restore(self) -> None:
        """Give the numbers their values before the step again."""
        for number in self._watched:
            number.attributes[number.name] = number.before

    def end_step(self) -> None:
        """Move the numbers of a worker that made no pass in this step as the others' passes did."""
        for number in self._watched:
            if not self._has_passed and number.last_move:
                number.attributes[number.name] = number.before + number.last_move
            elif self._has_passed and type(number.now) is type(number.before):
                number.last_move = number.now - number.before
        self._note_moves()
        if self._steps_to_look and self._has_passed:
            self._steps_to_look -= 1
            if not self._steps_to_look:
                moving = {id(number.attributes) for number in self._watched if number.has_moved}
                self._watched = [number for number in self._watched if id(number.attributes) in moving]

    def let_stand(self) -> None:
        """Begin the next pass with what the last one has made of the numbers."""
        self._note_moves()
        self.begin_step()

    def _note_moves(self) -> None:
        for number in self._watched:
            number.has_moved |= number.now != number.before

    def state(self) -> dict[str, float]:
        """The numbers that passes have moved, by path: a resumed run goes on from them."""
        return {number.path: number.now for number in self._watched if number.has_moved}

    def load_state(self, state: Mapping[str, float]) -> None:
        for number in self._watched:
            if number.path in state:
                number.attributes[number.name], number.has_moved = state[number.path], True
