"""Facts about the folder of runs and the memory that processes share."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.hardware.sources import read_text


@dataclass(frozen=True)
class StorageFacts:
    """The run folder and /dev/shm; None where there is no such folder."""

    shm_bytes: int | None = None
    """The size of /dev/shm."""
    shm_free_bytes: int | None = None
    folder: str = ""
    """Where runs are written, or would be: made absolute."""
    is_writable: bool = True
    obstacle: str = ""
    """What has the name of the folder, or of one above it, and is none."""
    free_bytes: int | None = None
    marker: str = ""
    """What this node reads in the file that another node wrote to see whether the folder is shared."""


def collect_storage(folder: Path, marker: Path | None = None, shm: Path = Path("/dev/shm")) -> StorageFacts:
    """Look at `folder`, or at the nearest folder above it that is there."""
    folder = folder.absolute()
    obstacle = next((level for level in (folder, *folder.parents) if os.path.lexists(level)), folder)
    there = next((level for level in (folder, *folder.parents) if level.is_dir()), Path("/"))
    shared = shutil.disk_usage(shm) if shm.is_dir() else None
    return StorageFacts(
        shm_bytes=None if shared is None else shared.total,
        shm_free_bytes=None if shared is None else shared.free,
        folder=str(folder),
        obstacle="" if obstacle.is_dir() else str(obstacle),
        is_writable=os.access(there, os.W_OK | os.X_OK),
        free_bytes=shutil.disk_usage(there).free,
        marker="" if marker is None else read_text(marker),
    )
