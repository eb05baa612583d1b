"""What a person means by a place: a run folder, a folder of checkpoints, one of them, or the same behind an address."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.load import list_folders
from paceline.checkpoint.manifest import MANIFEST_FILE
from paceline.checkpoint.storage import Storage, open_storage
from paceline.errors import CheckpointError

IN_RUN_FOLDER = "checkpoints"
"""Where a run folder has them."""


@dataclass(frozen=True)
class Place:
    """Where checkpoints lie."""

    storage: Storage
    name: str | None
    """The one that is meant; None: all of them."""


def find_place(address: str) -> Place:
    """The place at a path or an address.

    Raises:
        CheckpointError: there is nothing.
        OSError: it cannot be looked at.
    """
    storage = open_storage(address)
    names = storage.names()
    if MANIFEST_FILE in names:
        folder, name = split_address(address)
        return Place(open_storage(folder), name)
    if IN_RUN_FOLDER in names and not list_folders(storage):
        return Place(open_storage(f"{address.rstrip('/')}/{IN_RUN_FOLDER}"), None)
    if not names:
        raise CheckpointError(f"There is no folder '{address}', or there is nothing in it.")
    return Place(storage, None)


def split_address(address: str) -> tuple[str, str]:
    """The folder, and the name in it."""
    if "://" in address and not address.startswith("file://"):
        folder, _, name = address.rstrip("/").rpartition("/")
        return folder, name
    path = Path(address.removeprefix("file://")).absolute()
    # A name that is no name, "." or "..", is found where it leads to.
    path = path if path.name not in ("", "..") else path.resolve()
    return str(path.parent), path.name


@contextlib.contextmanager
def storage_problems(address: str, done: str = "read") -> Iterator[None]:
    """Makes one sentence of what a storage has to say. Raises `CheckpointError` for `OSError`."""
    try:
        yield
    except OSError as problem:
        raise CheckpointError(f"{address} cannot be {done}: {problem.strerror or problem}.") from None
