"""Checkpoints: written while training goes on, complete or absent, checked to the last byte before they are used."""

from __future__ import annotations

from paceline.checkpoint.load import Checkpoint, newest_good, newest_that, read_checkpoint, verify_checkpoint
from paceline.checkpoint.save import Saver, Snapshot
from paceline.checkpoint.storage import open_storage
from paceline.checkpoint.together import Loaded, SameCatalogue, Stored, read_together
from paceline.checkpoint.tree import put_together, take_apart
from paceline.checkpoint.weights import save_weights

__all__ = [
    "Checkpoint",
    "Loaded",
    "SameCatalogue",
    "Saver",
    "Snapshot",
    "Stored",
    "newest_good",
    "newest_that",
    "open_storage",
    "put_together",
    "read_checkpoint",
    "read_together",
    "save_weights",
    "take_apart",
    "verify_checkpoint",
]
