"""Which number of devices to recommend, where to cut a model into stages, and random bits: rules that several rooms
share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from paceline.errors import ModelError

NEARLY = 0.97
RULE = "the fewest devices that come within 3 % of the fastest"
"""The rule of `fewest_near_fastest`, as pages say it."""
GOLDEN, _MASK = 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF
"""What SplitMix64 adds to its state for each draw, and its 64 bits."""


def fewest_near_fastest(speeds: Sequence[float]) -> int:
    """The place of the recommended one of several numbers of devices that keep all limits. `speeds`: of one or
    more, in ascending order of devices."""
    return next(place for place, speed in enumerate(speeds) if speed >= NEARLY * max(speeds))


def even_cut(work: Sequence[float], may_begin: Sequence[bool], num_stages: int) -> list[int]:
    """The first layer of every stage, such that stages have about equally much work: each begins with the layer before
    which there is most nearly its part of it; the last one of several, as what an activation and a pooling leave is
    smaller. Raises `ModelError` where there are too few layers.

    Args:
        work: of each layer, in any unit.
        may_begin: whether a stage may begin with the layer; the first one always does.
    """
    places = [place for place, may in enumerate(may_begin) if place and may]
    if len(places) < num_stages - 1:
        raise ModelError(
            f"A model of {len(work)} layers that can begin {len(places) + 1} stages cannot be cut into {num_stages}; "
            "use fewer workers on the axis pp, or fewer stages per worker."
        )
    before = [0.0, *accumulate(work)]
    starts = [0]
    for stage in range(1, num_stages):
        part = before[-1] * stage / num_stages
        possible = [place for place in places if place > starts[-1]]
        possible = possible[: len(possible) - (num_stages - 1 - stage)]  # the others need one each
        starts.append(min(possible, key=lambda place: (abs(before[place] - part), -place)))
    return starts


def split_mix(state: int, index: Any) -> Any:
    """Draw number `index`, from 0, of SplitMix64 in a state: 64 bits (Steele, Lea, Flood: "Fast splittable pseudorandom
    number generators", OOPSLA 2014). `index`: a whole number, or an array of them in uint64, for as many draws."""
    bits = state + (index + 1) * GOLDEN & _MASK
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
    return bits ^ (bits >> 31)
