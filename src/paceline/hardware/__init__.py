"""What this machine has, how to read what another one has, and what is wrong with either."""

from __future__ import annotations

from paceline.hardware.detect import detect
from paceline.hardware.matrix import read_topology

__all__ = ["detect", "read_topology"]
