"""Plans: how to spread a job over a cluster's devices, and forecasts of its speed and memory."""

from __future__ import annotations

from paceline.plan.placement import pick, place, spread

__all__ = ["pick", "place", "spread"]
