"""Checkpoints: written while training goes on, complete or absent, checked to the last byte before they are used."""

from __future__ import annotations

from paceline.checkpoint.load import (
    Loaded,
    Stored,
    newest_good,
    newest_that,
    read_checkpoint,
    read_together,
    verify_checkpoint,
)
from paceline.checkpoint.save import Saver, Snapshot
from paceline.checkpoint.storage import open_storage
from paceline.checkpoint.weights import save_weights

__all__ = [
    "Loaded",
    "Saver",
    "Snapshot",
    "Stored",
    "newest_good",
    "newest_that",
    "open_storage",
    "read_checkpoint",
    "read_together",
    "save_weights",
    "verify_checkpoint",
]
