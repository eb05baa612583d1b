"""Checkpoints: written while training goes on, complete or absent, checked to the last byte before they are used."""

from __future__ import annotations

from paceline.checkpoint.load import Loaded, Stored, newest_that, read_state, verify_checkpoint
from paceline.checkpoint.save import Saver, Snapshot
from paceline.checkpoint.storage import open_storage
from paceline.checkpoint.weights import read_weights, save_weights

__all__ = [
    "Loaded",
    "Saver",
    "Snapshot",
    "Stored",
    "newest_that",
    "open_storage",
    "read_state",
    "read_weights",
    "save_weights",
    "verify_checkpoint",
]
