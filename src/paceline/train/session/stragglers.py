"""Detection of stragglers: which worker slows the others down, by how much, and since when."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

WINDOW_STEPS = 50
"""The number of steps whose median times are compared, so that single slow steps do not count."""

SLOW = 1.3
"""A straggler takes this many times the median of the others; less is the usual scatter of equal devices."""


class Stragglers:
    """Compares the workers' own step times, one window of steps at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: the display name of each worker, by rank."""
        self._names = names
        self._times: list[deque[float]] = [deque(maxlen=WINDOW_STEPS) for _ in names]
        self._num_steps = 0
        self._slow: set[int] = set()

    def note(self, step: int, own_times_s: Sequence[float]) -> list[str]:
        """A sentence for every worker that has become slow, or is no longer, in the window that ends with `step`.

        Args:
            own_times_s: step time of each worker, by rank, without waiting for others; 0 if unknown.
        """
        for times, own_time_s in zip(self._times, own_times_s, strict=True):
            if own_time_s > 0:
                times.append(own_time_s)
        self._num_steps += 1
        if self._num_steps % WINDOW_STEPS or len(self._names) < 2:
            return []
        medians = {rank: statistics.median(times) for rank, times in enumerate(self._times) if times}
        sentences = []
        for rank, own_s in medians.items():
            # Beside the others alone: of two workers, one is half of any median.
            others_s = statistics.median([s for other, s in medians.items() if other != rank] or [own_s])
            if own_s > SLOW * others_s and rank not in self._slow:
                self._slow.add(rank)
                since = max(1, step - WINDOW_STEPS + 1)
                sentences.append(
                    f"{self._names[rank]} holds the others up since about step {since}: its part of a step takes "
                    f"{1e3 * own_s:.3g} ms, {own_s / others_s:.1f} times the median of the others."
                )
            elif own_s <= SLOW * others_s and rank in self._slow:
                self._slow.remove(rank)
                sentences.append(f"{self._names[rank]} is as fast as the others again at step {step}.")
        return sentences
