"""Reads and writes files in places where anybody may have put something: it neither waits nor reads without bound.

Only regular files are read, directly or through links. A FIFO, a device or a socket in the place of a file is an
`OSError` at once, and so is a file that is larger than what is expected there: its size is known before it is read.
What is written replaces whatever had the name, and is complete or absent.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

MOST_TEXT_BYTES = 256 << 20
"""No job, record, table or report is larger."""

STALE_VIEW_S = 60.0
"""For at most this long a node takes the old content of a shared file for the present one, or believes it absent."""

_MOST_REPLACED = 3
"""How often a file may be replaced by another node while it is being read."""

NO_FILE = (errno.EINVAL, errno.EISDIR, errno.EFBIG, errno.EILSEQ, errno.ELOOP)
"""Numbers of the errors that say that something else lies in the place of a file."""

_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


def open_regular(path: Path | str) -> BinaryIO:
    """Open a regular file for unbuffered reading.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    # Without O_NONBLOCK a named pipe is opened only when somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"Is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, not a file", str(path))
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path | str, most_bytes: int | None = None) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than `most_bytes`.
    """
    for _ in range(_MOST_REPLACED):
        try:
            return _read_once(path, most_bytes)
        except OSError as problem:  # on a network file system, of a file that another node has replaced since
            if problem.errno != errno.ESTALE:
                raise
    return _read_once(path, most_bytes)


def _read_once(path: Path | str, most_bytes: int | None) -> bytes:
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if most_bytes is not None and num_bytes > most_bytes:
            raise OSError(errno.EFBIG, f"{num_bytes:,} bytes, and {most_bytes:,} at most can be meant", str(path))
        content = bytearray()
        # It may grow meanwhile; what the kernel makes up on the spot (/proc) has a size of 0.
        limit = max(num_bytes, 1 << 20) if most_bytes is None else most_bytes
        while len(content) < limit and (piece := file.read(min(limit - len(content), 8 << 20))):
            content += piece
    return bytes(content)


def read_text(path: Path | str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text of a regular file, whose line ends are those of the file.

    Raises:
        OSError: it cannot be read, is no regular file, too large for a text, or not in `encoding`.
    """
    try:
        return read_bytes(path, MOST_TEXT_BYTES).decode(encoding, errors)
    except UnicodeDecodeError as problem:
        raise OSError(errno.EILSEQ, f"no text in {encoding.upper()} (byte {problem.start})", str(path)) from None
    except ValueError as problem:  # a name with a zero in it
        raise OSError(errno.EINVAL, str(problem), str(path)) from None


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises `ValueError`, whatever is wrong with it."""
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path | str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        OSError: as `read_text`.
        ValueError: it holds no JSON object.
    """
    value = parse_json(read_text(path))
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > 40:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def create(path: Path | str, mode: int) -> BinaryIO:
    """Make a new file for unbuffered writing in the place of whatever has this name, links to other files included.

    Raises:
        OSError: it cannot be made, or there is a directory of that name.
    """
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, mode), "wb", buffering=0)


def replace_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a text file that is complete or what it was before.

    Args:
        mode: its permissions, less those that the umask takes away.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        with create(draft, mode) as file:
            rest = memoryview(text.encode("utf-8", "surrogateescape"))
            while rest:
                rest = rest[file.write(rest) or 0 :]
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def make_run_folder(path: Path) -> None:
    """Make a folder of a run, and those above it that are missing, as private as the run's files; it may exist.

    Raises:
        OSError: it cannot be made.
    """
    mode = run_file_mode()
    mode |= (mode & 0o444) >> 2
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir(mode, exist_ok=True)


def refuge(name: str, write: Callable[[Path], None]) -> Path | None:
    """Write something into a new folder where one can be made: here, at home, or with temporary files.

    Returns:
        The folder; None where none of these places takes it.
    """
    for parent in (Path.cwd, Path.home, lambda: Path(tempfile.gettempdir())):
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{name[:50]}-saved-", dir=parent()))
        except (OSError, RuntimeError):  # a working directory that was deleted, a user without a home
            continue
        try:
            write(folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            return folder
    return None


def run_file_mode() -> int:
    """The permissions of what a run writes: its owner's alone, or all that the umask allows if it lets a group write.

    People who share their runs with a group set such an umask.
    """
    try:
        status = Path("/proc/self/status").read_text()
        umask = int(status.partition("\nUmask:")[2].split()[0], 8)  # asking for it any other way changes it
    except (OSError, ValueError, IndexError):
        return 0o600
    return 0o600 if umask & 0o020 else 0o666 & ~umask
