"""From a cluster and a job to a plan."""

from __future__ import annotations

from paceline.plan.one_node import place

__all__ = ["place"]
