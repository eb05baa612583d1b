"""How many random numbers a script draws by NumPy and Python between `run.batches` and `run.step`.

Their generators do not tell what their numbers are for. They are alike on all workers, each of which has only its own
samples: a number for all samples is right, numbers for each of them are other ones on another number of workers.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from paceline.own_generators import RandomGenerator, full_state, generators_of_caller

_WORDS = 624
"""The words of 32 bits that a Mersenne Twister makes at once; every number takes one or more of them."""


class HostDraws:
    """Counts what is drawn from now on from the global generators, and from those that the script itself has."""

    def __init__(self) -> None:
        shared: list[RandomGenerator] = [random._inst, np.random.mtrand._rand]
        self._shared = [(one, full_state(one)) for one in shared]
        own = (one for one in generators_of_caller() if not isinstance(one, torch.Generator))
        self._own = [(one, full_state(one)) for one in own]

    def are_many(self, num_words: int) -> bool:
        """Whether so many words of 32 bits were drawn from one of them, or more."""
        return any(_has_drawn(one, before, num_words) for one, before in (*self._shared, *self._own))

    def from_own(self) -> list[RandomGenerator]:
        """The script's own generators that have been drawn from."""
        return [one for one, before in self._own if _has_drawn(one, before, 1)]


def _has_drawn(generator: RandomGenerator, before: Any, num_words: int) -> bool:
    """Whether a generator has made so many words of 32 bits since it was in a state."""
    twister, twister_now = _twister(before), _twister(full_state(generator))
    if twister is not None and twister_now is not None:
        return _words_of_twister(twister, twister_now) >= num_words
    bits: Any = getattr(generator, "bit_generator", None) or generator._bit_generator  # type: ignore[union-attr]
    now, copied = repr(bits.state["state"]), type(bits)()
    copied.state = before
    for _ in range(num_words):  # a generator makes one word at a time, or two
        if repr(copied.state["state"]) == now:
            return False
        copied.random_raw()
    return True


def _twister(state: Any) -> tuple[bytes, int] | None:
    """The words that a Mersenne Twister has made, and how many of them are used; None: it is another generator."""
    if not isinstance(state, dict):  # of Python
        return repr(state[1][:_WORDS]).encode(), state[1][_WORDS]
    if state["bit_generator"] != "MT19937":
        return None
    return state["state"]["key"].tobytes(), int(state["state"]["pos"])


def _words_of_twister(before: tuple[bytes, int], now: tuple[bytes, int]) -> int:
    """At least so many words were taken in between."""
    (words, used), (words_now, used_now) = before, now
    if words == words_now:
        return used_now - used
    # Where all words are unused or all are used, it was seeded and nothing was drawn since.
    return 0 if used_now == _WORDS else _WORDS - used + used_now
