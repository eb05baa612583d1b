"""How many random numbers a script draws by NumPy and Python between `run.batches` and `run.step`.

Their generators do not tell what their numbers are for. They are alike on all workers, each of which has only its own
samples: a number for all samples is right, numbers for each of them are other ones on another number of workers.
"""

from __future__ import annotations

import sys

from paceline.parallel.random_numbers.generators import MT19937_BYTES, host_states

_WORDS = 624
"""The words of 32 bits that a Mersenne Twister makes at once; every number takes one or more of them."""


class HostDraws:
    """Counts what is drawn from NumPy's and Python's global generators from now on."""

    def __init__(self) -> None:
        self._before = _places()

    def least_words(self) -> int:
        """So many words of 32 bits were drawn from one of them, or more."""
        pairs = zip(self._before, _places(), strict=False)  # the user may have installed another generator
        return max(_least_words(before, now) for before, now in pairs)


def _places() -> list[tuple[object, int]]:
    """The words that each generator has made, and how many of them are used."""
    of_numpy, (_, words, _) = host_states()
    found: list[tuple[object, int]] = [(words[:_WORDS], words[_WORDS])]
    if len(of_numpy) == MT19937_BYTES:  # the user may have installed another bit generator
        found.append((of_numpy[: 4 * _WORDS], int.from_bytes(of_numpy[4 * _WORDS :], sys.byteorder)))
    return found


def _least_words(before: tuple[object, int], now: tuple[object, int]) -> int:
    (words, used), (words_now, used_now) = before, now
    if words == words_now:
        return used_now - used
    # Where all words are unused or all are used, it was seeded and nothing was drawn since.
    return 0 if used_now == _WORDS else _WORDS - used + used_now
