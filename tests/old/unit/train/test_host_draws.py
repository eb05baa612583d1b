"""How much is drawn from generators of NumPy and Python, as far as it is counted."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.train.steps.host_draws import HostDraws

GENERATORS: dict[str, Callable[[], Any]] = {
    "PCG64": lambda: np.random.default_rng(3),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(3)),
    "Philox": lambda: np.random.Generator(np.random.Philox(3)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(3)),
    "RandomState": lambda: np.random.RandomState(3),
    "RandomState of another": lambda: np.random.RandomState(np.random.PCG64(3)),
    "Python": lambda: random.Random(3),
    "NumPy's global one": lambda: np.random,
    "Python's global one": lambda: random,
}


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("num_before", [0, 1, 620])
def test_numbers_are_counted_from_below(kind: str, num_before: int) -> None:
    generator = GENERATORS[kind]()
    for _ in range(num_before):
        generator.random()
    draws = HostDraws()
    assert not draws.are_many(1) and not draws.from_own()
    for _ in range(20):
        generator.random()
    assert draws.are_many(20 if kind != "Philox" else 16)  # which moves once for four words
    assert not draws.are_many(60)
    assert draws.from_own() == ([] if "global" in kind else [generator])


def test_a_new_seed_is_no_draw() -> None:
    draws = HostDraws()
    np.random.seed(5)
    random.seed(5)
    assert not draws.are_many(1)


class _Trainer:
    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def found(self) -> list[Any]:
        draws = HostDraws()
        self.generator.normal(size=30)
        return draws.from_own()


def test_those_of_attributes_and_of_the_functions_around_are_found() -> None:
    trainer, local = _Trainer(), random.Random(1)
    assert trainer.found() == [trainer.generator]

    def inner() -> list[Any]:
        draws = HostDraws()
        local.random()
        return draws.from_own()

    assert inner() == [local]


class _Closed:
    """Has no attributes but those that it makes when they are asked for."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(name)


def test_an_object_that_refuses_to_be_looked_at_is_left_alone() -> None:
    closed = _Closed()
    draws = HostDraws()
    random.random()
    assert draws.are_many(1) and not draws.from_own(), closed


def test_looking_keeps_no_value_alive() -> None:
    """The variables of a function that goes on are not copied for longer than the look takes."""

    class Large:
        pass

    value = Large()
    known = weakref.ref(value)
    HostDraws()
    del value
    assert known() is None
