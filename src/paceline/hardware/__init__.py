"""What this machine has, and how to read what another one has."""

from __future__ import annotations

from paceline.hardware.detect import detect
from paceline.hardware.read import read_topology
from paceline.hardware.smi_matrix import parse_topology

__all__ = ["detect", "parse_topology", "read_topology"]
