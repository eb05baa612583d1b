"""The storage of checkpoints: a folder of a local or shared file system, or an address such as s3://bucket/run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from paceline.errors import CheckpointError
from paceline.regular_files import make_durable, make_run_folder, run_file_mode, write_file

Piece = bytes | bytearray | memoryview


class Storage:
    """Named files in named folders, one level deep ("step-00000012/manifest.json"), and files beside them, wherever
    fsspec finds them. Whatever goes wrong raises `OSError`, as it does for plain files."""

    def __init__(self, address: str) -> None:
        """Raises `CheckpointError` for an address that this installation cannot reach."""
        self.address = address
        try:
            self._files, root = fsspec.core.url_to_fs(address)
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

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing happens where there is none."""
        with _as_os_error(), contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)

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


def open_storage(address: str | Path) -> Storage:
    """The storage at a path or an address. Raises `CheckpointError` as `Storage` does."""
    return Storage(str(address))
