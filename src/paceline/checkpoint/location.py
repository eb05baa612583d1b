"""What a user may name: a run folder, a folder of checkpoints, or one checkpoint; as a path or an address."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.load import list_folders
from paceline.checkpoint.manifest import MANIFEST_FILE
from paceline.checkpoint.storage import Storage, open_storage
from paceline.errors import CheckpointError

IN_RUN_FOLDER = "checkpoints"
"""The folder of checkpoints in a run folder."""


def find_location(address: str) -> tuple[Storage, str | None]:
    """The checkpoints at a path or an address: their storage; the name of the one that is meant, None: all of them.

    Raises:
        CheckpointError: there is nothing at that address.
        OSError: the address cannot be read.
    """
    storage = open_storage(address)
    names = storage.names()
    if MANIFEST_FILE in names:
        folder, name = split_address(address)
        return open_storage(folder), name
    if f"{IN_RUN_FOLDER}/" in names and not list_folders(storage):
        return open_storage(f"{address.rstrip('/')}/{IN_RUN_FOLDER}"), None
    if not names:
        raise CheckpointError(f"There is no folder '{address}', or there is nothing in it.")
    return storage, None


def split_address(address: str) -> tuple[str, str]:
    """The parent folder, and the name in it."""
    if "://" in address and not address.startswith("file://"):
        folder, _, name = address.rstrip("/").rpartition("/")
        return folder, name
    path = Path(address.removeprefix("file://")).absolute()
    # A name that is no name, "." or "..", is found where it leads to.
    path = path if path.name not in ("", "..") else path.resolve()
    return str(path.parent), path.name
