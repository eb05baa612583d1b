"""What this machine has, and how to read what another one has."""

from __future__ import annotations

from paceline.hardware.detect import detect
from paceline.hardware.read import read_topology

__all__ = ["detect", "read_topology"]
