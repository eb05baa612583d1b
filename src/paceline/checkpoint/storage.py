"""The storage of checkpoints: a folder of a local or shared file system, or an address such as s3://bucket/run."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from paceline.errors import CheckpointError
from paceline.regular_files import create, make_run_folder, open_regular, read_bytes, run_file_mode
from paceline.run_lease import hold_folder

Piece = bytes | bytearray | memoryview

MOST_READ_BYTES = 1 << 30
"""No manifest is larger: one of a million slices of tensors has some 200 MB."""

PIECE_BYTES = 8 << 20
"""Bytes read, written and checksummed at a time: the checksum is taken of data still in the processor's cache."""


class Catalogue(Protocol):
    """Named files in named folders, one level deep ("step-00000012/manifest.json"), and files beside them.

    Whatever goes wrong raises `OSError`, as it does for plain files.
    """

    address: str

    def read(self, name: str) -> bytes:
        """The whole content, `MOST_READ_BYTES` at most. Raises `FileNotFoundError` where there is no such file."""

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder, sorted; an empty list if there is no such folder."""

    def folders(self) -> list[str]:
        """Those of `names()` that are folders."""


class Storage(Catalogue, Protocol):
    """A catalogue whose files can also be read in pieces, written and removed."""

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        """Make or replace a file. It has its name only once it is complete and would survive a power cut."""

    def pieces(self, name: str) -> Iterator[bytes]:
        """The content, a little at a time. Raises `FileNotFoundError` where there is no such file."""

    def stretch(self, name: str, start: int, stop: int) -> bytearray:
        """Bytes start … stop - 1 of the content, or as many of them as there are."""

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it; nothing happens where there is none."""

    def claim(self, folder: str) -> bool:
        """Make a folder; returns whether this call made it, and no other process."""


class Folder:
    """A folder of a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.address = str(path)

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        path = self.path / name
        unfinished = path.with_name(path.name + ".part")
        if not path.parent.is_dir():
            make_run_folder(path.parent)
            _make_durable(path.parent.parent)
        try:
            with create(unfinished, run_file_mode()) as file:
                for piece in pieces:
                    _write_all(file, piece)
                os.fsync(file.fileno())
            unfinished.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        _make_durable(path.parent)

    def pieces(self, name: str) -> Iterator[bytes]:
        with open_regular(self.path / name) as file:
            yield from iter(lambda: file.read(PIECE_BYTES), b"")

    def stretch(self, name: str, start: int, stop: int) -> bytearray:
        content = bytearray()
        with open_regular(self.path / name) as file:
            file.seek(start)
            while piece := file.read(min(PIECE_BYTES, stop - start - len(content))):
                content += piece
        return content

    def read(self, name: str) -> bytes:
        return read_bytes(self.path / name, MOST_READ_BYTES)

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(path.name for path in (self.path / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folders(self) -> list[str]:
        return [name for name in self.names() if (self.path / name).is_dir()]

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def claim(self, folder: str) -> bool:
        make_run_folder(self.path)
        try:
            (self.path / folder).mkdir(mode=0o700)
        except FileExistsError:
            return False
        _make_durable(self.path)
        return True


@contextlib.contextmanager
def held(storage: Storage, token: str, say: Callable[[str], None]) -> Iterator[None]:
    """A context in which no other run can save to the storage (`hold_folder`); object stores cannot be locked, so
    nothing is done for them. Raises `LaunchError`, which names the other run, if one saves there."""
    with contextlib.ExitStack() as held:
        if isinstance(storage, Folder):
            with contextlib.suppress(OSError):  # nothing can be written there; that is told when it is tried
                make_run_folder(storage.path)
                held.enter_context(hold_folder(storage.path, token, say))
        yield


class Remote:
    """A place that fsspec knows how to reach, such as s3://bucket/run. An object there is complete or absent."""

    def __init__(self, address: str) -> None:
        import fsspec

        self.address = address
        try:
            self._files, root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as problem:
            raise CheckpointError(f"Checkpoints cannot be kept at {address}: {problem}.") from None
        self._root = root.rstrip("/")

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        with self._as_os_error(), self._files.open(self._path(name), "wb") as file:
            for piece in pieces:
                file.write(piece)

    def pieces(self, name: str) -> Iterator[bytes]:
        with self._as_os_error(), self._files.open(self._path(name), "rb") as file:
            yield from iter(lambda: file.read(PIECE_BYTES), b"")

    def stretch(self, name: str, start: int, stop: int) -> bytearray:
        with self._as_os_error():
            return bytearray(self._files.cat_file(self._path(name), start=start, end=stop))

    def read(self, name: str) -> bytes:
        with self._as_os_error():
            content: bytes = self._files.cat_file(self._path(name), start=0, end=MOST_READ_BYTES + 1)
        if len(content) > MOST_READ_BYTES:
            raise OSError(errno.EFBIG, f"more than {MOST_READ_BYTES:,} bytes")
        return content

    def names(self, folder: str = "") -> list[str]:
        return sorted(self._kinds(folder))

    def folders(self) -> list[str]:
        return sorted(name for name, kind in self._kinds("").items() if kind == "directory")

    def remove(self, name: str) -> None:
        with self._as_os_error(), contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)

    def _kinds(self, folder: str) -> dict[str, str]:
        """What lies in a folder: "file" or "directory" by name."""
        path = self._path(folder)
        with self._as_os_error():
            self._files.invalidate_cache()
            try:
                found: list[dict[str, Any]] = self._files.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        # Asked for a file, or a folder that is an object of its own, some storages answer with just that.
        inside = [one for one in found if str(one["name"]).strip("/") != path.strip("/")]
        return {str(one["name"]).rstrip("/").rpartition("/")[2]: str(one["type"]) for one in inside}

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as problem:  # every kind of storage has errors of its own
            raise OSError(f"{type(problem).__name__}: {problem}") from problem

    def claim(self, folder: str) -> bool:
        """Stores of objects have no folders: two may both be told yes, and then write the same."""
        return not self.names(folder)


def open_storage(address: str | Path) -> Storage:
    """The storage at a path or an address. Raises `CheckpointError` for an address that this installation
    cannot reach."""
    text = str(address)
    if "://" in text and not text.startswith("file://"):
        return Remote(text)
    return Folder(Path(text.removeprefix("file://")))


def _write_all(file: IO[bytes], piece: Piece) -> None:
    """An unbuffered file may take less than it is given: a little at a time, so that other threads get their turn."""
    view = memoryview(piece)
    while view:
        view = view[file.write(view[:PIECE_BYTES]) :]


def _make_durable(folder: Path) -> None:
    """Names live in the folder, which has to reach the disk too."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):  # some network file systems have nothing to flush here
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
