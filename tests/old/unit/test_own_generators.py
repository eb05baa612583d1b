from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from paceline.own_generators import is_same_code


class Trainer:
    def loss(self) -> float:
        return 0.0

    def other_loss(self) -> float:
        return 1.0


def scaled(*_: object, scale: float = 1.0, teacher: object = None) -> tuple[float, object]:
    return scale, teacher


TRAINER, TEACHER = Trainer(), object()


@pytest.mark.parametrize(
    ("make", "other", "is_same"),
    [
        (lambda: TRAINER.loss, lambda: TRAINER.loss, True),
        (lambda: TRAINER.loss, lambda: TRAINER.other_loss, False),
        (lambda: TRAINER.loss, lambda: Trainer().loss, False),
        (lambda: functools.partial(scaled, scale=0.1), lambda: functools.partial(scaled, scale=0.2), True),
        (lambda: functools.partial(scaled, teacher=TEACHER), lambda: functools.partial(scaled, teacher=TEACHER), True),
        (lambda: functools.partial(scaled, teacher=TEACHER), lambda: functools.partial(scaled, teacher=[]), False),
        (lambda: functools.partial(scaled, scale=0.1), lambda: functools.partial(scaled, teacher=0.1), False),
        (lambda: functools.partial(scaled, 1), lambda: functools.partial(scaled, 1, 2), False),
        (lambda: functools.partial(TRAINER.loss), lambda: functools.partial(TRAINER.loss), True),
    ],
)
def test_what_a_loop_makes_in_every_round_is_the_same(
    make: Callable[[], object], other: Callable[[], object], is_same: bool
) -> None:
    assert is_same_code(make(), other()) == is_same
