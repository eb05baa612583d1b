"""What a run leaves behind of its weights."""

from __future__ import annotations

from paceline.checkpoint.weights import save_weights

__all__ = ["save_weights"]
