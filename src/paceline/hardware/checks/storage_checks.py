"""The folder of runs and the memory that processes share."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.hardware.checks.finding import Finding, error, ok, size_text, warning
from paceline.hardware.checks.system import read

SHARED_MEMORY_BYTES = 32 * 2**20
"""What sums through shared memory take at most, for all workers of a node."""
LOADER_BYTES = 2**30
"""Batches under way between loader processes and workers: tens of megabytes each, a few of every process."""
MIN_DISK_BYTES = 2**30
COMFORTABLE_DISK_BYTES = 10 * 2**30
"""A checkpoint with optimizer state takes 12 bytes a parameter: room for one of a billion parameters."""


@dataclass(frozen=True)
class StorageFacts:
    """None where there is no such folder."""

    shm_bytes: int | None = None
    """The size of /dev/shm."""
    shm_free_bytes: int | None = None
    folder: str = ""
    """Where runs are written, or would be: made absolute."""
    is_writable: bool = True
    free_bytes: int | None = None
    marker: str = ""
    """What this node reads in the file that another node wrote to see whether the folder is shared."""


def collect_storage(folder: Path, marker: Path | None = None, shm: Path = Path("/dev/shm")) -> StorageFacts:
    """Look at `folder`, or at the nearest folder above it that is there."""
    folder = folder.absolute()
    there = next((level for level in (folder, *folder.parents) if level.is_dir()), Path("/"))
    shared = shutil.disk_usage(shm) if shm.is_dir() else None
    return StorageFacts(
        shm_bytes=None if shared is None else shared.total,
        shm_free_bytes=None if shared is None else shared.free,
        folder=str(folder),
        is_writable=os.access(there, os.W_OK | os.X_OK),
        free_bytes=shutil.disk_usage(there).free,
        marker="" if marker is None else read(marker),
    )


def check_storage(facts: StorageFacts) -> list[Finding]:
    return [
        *check_shared_memory(facts.shm_bytes, facts.shm_free_bytes),
        *check_folder(facts.folder, is_writable=facts.is_writable, free_bytes=facts.free_bytes),
    ]


def check_shared_memory(total_bytes: int | None, free_bytes: int | None) -> list[Finding]:
    """Too little of it shows as "Bus error" in loaders; containers have 64 MB unless told otherwise."""
    check = "/dev/shm"
    if total_bytes is None or free_bytes is None:
        return warning(
            check,
            "There is no /dev/shm: workers of this node will sum over sockets, and loader processes cannot pass "
            "batches.",
            "sudo mount -t tmpfs -o size=8G shm /dev/shm",
        )
    enlarge = "sudo mount -o remount,size=8G /dev/shm; in a container: --shm-size=8g or --ipc=host"
    clear = "See what fills it: ls -lS /dev/shm"
    if free_bytes < SHARED_MEMORY_BYTES:
        return error(
            check,
            f"/dev/shm has {size_text(free_bytes)} free of {size_text(total_bytes)}; sums through shared memory take "
            f"up to {size_text(SHARED_MEMORY_BYTES)}.",
            enlarge if total_bytes < LOADER_BYTES else clear,
        )
    if free_bytes < LOADER_BYTES:
        return warning(
            check,
            f"/dev/shm has {size_text(free_bytes)} free of {size_text(total_bytes)}: enough for sums, but data loader "
            'processes may end with "Bus error".',
            enlarge if total_bytes < LOADER_BYTES else clear,
        )
    return ok(check, f"/dev/shm has {size_text(free_bytes)} free.")


def check_folder(folder: str, *, is_writable: bool, free_bytes: int | None) -> list[Finding]:
    check = "run folder"
    if not is_writable:
        return error(check, f"Nothing can be written to {folder}.", "Name another folder with --out.")
    if free_bytes is None or free_bytes >= COMFORTABLE_DISK_BYTES:
        return ok(check, f"{folder} can be written to and has room.")
    what = f"{folder} has {size_text(free_bytes)} free"
    fix = "Make room, or name another folder with --out."
    if free_bytes < MIN_DISK_BYTES:
        return error(check, f"{what}: a checkpoint may not fit.", fix)
    return warning(check, f"{what}: enough for few checkpoints.", fix)
