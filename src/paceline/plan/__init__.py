"""From a cluster and a job to a plan."""

from __future__ import annotations

from paceline.plan.pick import pick
from paceline.plan.placement import place, spread

__all__ = ["pick", "place", "spread"]
