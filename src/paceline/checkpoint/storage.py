"""Where checkpoints are: a folder of a local or shared file system, or an address such as s3://bucket/run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from paceline.checkpoint.format import MANIFEST_FILE
from paceline.errors import CheckpointError
from paceline.regular_files import make_durable, make_run_folder, run_file_mode, write_file

Piece = bytes | bytearray | memoryview

IN_RUN_FOLDER = "checkpoints"
"""The folder of checkpoints in a run folder."""

LATEST_FILE, BEST_FILE = "latest", "best"
"""Name the newest checkpoint, and the best by `keep_best`, for people and scripts; what is resumed from does not rely
on them."""

_FOLDER_NAME = re.compile(r"step-([0-9]{8,18})")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step in the name of a checkpoint's folder; None for other names."""
    return int(found[1]) if (found := _FOLDER_NAME.fullmatch(folder)) else None


class Storage:
    """Named files in named folders, one level deep ("step-00000012/manifest.json"), and files beside them, wherever
    fsspec finds them. Whatever goes wrong raises `OSError`, as it does for plain files."""

    def __init__(self, address: str | Path) -> None:
        """Raises `CheckpointError` for an address that this installation cannot reach."""
        self.address = str(address)
        try:
            self._files, root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as problem:
            raise CheckpointError(f"Checkpoints cannot be kept at {address}: {problem}.") from None
        self._root = root.rstrip("/")
        self.folder = Path(root) if isinstance(self._files, LocalFileSystem) else None
        """The folder, if it is one of a file system."""

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """Make or replace a file. In a folder it has its name only once it is complete and would survive a power cut;
        an object of a store is complete or absent."""
        if self.folder is None:
            with _as_os_error(), self._files.open(self._path(name), "wb") as file:
                for piece in pieces:
                    file.write(piece)
            return
        path = self.folder / name
        if not path.parent.is_dir():
            make_run_folder(path.parent)
            make_durable(path.parent.parent)
        write_file(path, pieces, run_file_mode(), durable=True)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        """Bytes start … stop - 1 of a file, or as many of them as there are; None: to its end."""
        with _as_os_error():
            return bytearray(self._files.cat_file(self._path(name), start=start, end=stop))

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder, sorted, those of folders with a slash behind; empty if there is no such folder."""
        path = self._path(folder)
        with _as_os_error():
            self._files.invalidate_cache()
            try:
                found = [(str(one["name"]).rstrip("/"), one["type"]) for one in self._files.ls(path, detail=True)]
            except (FileNotFoundError, NotADirectoryError):
                return []
        # Asked for a file, or a folder that is an object of its own, some storages answer with just that.
        inside = [(name, kind) for name, kind in found if name.strip("/") != path.strip("/")]
        return sorted(name.rpartition("/")[2] + "/" * (kind == "directory") for name, kind in inside)

    def checkpoints(self) -> dict[str, bool]:
        """The folders with the name of a checkpoint, oldest first, and whether each is complete, good or damaged. Into
        others a process writes now, or it ended while it wrote or deleted. Folders of other names are ignored."""
        folders = [name.rstrip("/") for name in self.names() if name.endswith("/")]
        steps = sorted((step, name) for name in folders if (step := step_of(name)) is not None)
        return {name: MANIFEST_FILE in self.names(name) for _, name in steps}

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing happens where there is none."""
        # A checkpoint without its manifest is none any more, whatever happens next.
        for path in (f"{name}/{MANIFEST_FILE}", name):
            with _as_os_error(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._files.rm(self._path(path), recursive=True)

    def claim(self, folder: str) -> bool:
        """Make a folder; returns whether this call made it, and no other process. Stores of objects have no folders:
        two may both be told yes, and then write the same."""
        if self.folder is None:
            return not self.names(folder)
        path = self.folder / folder
        make_run_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return True
        return False

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as problem:  # every kind of storage has errors of its own
        raise OSError(f"{type(problem).__name__}: {problem}") from problem
