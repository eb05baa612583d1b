"""What this machine has."""

from __future__ import annotations

from paceline.hardware.detect import detect

__all__ = ["detect"]
