"""Which of several numbers of devices to recommend: one rule for forecasts and for studies."""

from __future__ import annotations

from collections.abc import Sequence

NEARLY = 0.97
RULE = "the fewest devices that come within 3 % of the fastest"
"""The rule of `fewest_near_fastest`, as pages say it."""


def fewest_near_fastest(speeds: Sequence[float]) -> int:
    """The place of the recommended one of several numbers of devices that keep all limits.

    Args:
        speeds: of each, in ascending order of devices; one at least.
    """
    return next(place for place, speed in enumerate(speeds) if speed >= NEARLY * max(speeds))
