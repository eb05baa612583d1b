"""Files that are complete or what they were before, and the permissions of what a run writes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_text(path: Path | str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text of a file, line ends as they are. Raises `OSError`, also where it is not in `encoding`."""
    try:
        return Path(path).read_bytes().decode(encoding, errors)
    except UnicodeDecodeError as problem:
        raise OSError(errno.EILSEQ, f"no text in {encoding.upper()} (byte {problem.start})", str(path)) from None


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises `ValueError`, whatever is wrong with it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path | str) -> dict[str, Any]:
    """The object in a JSON file. Raises `OSError` as `read_text`, and `ValueError` where it holds no object."""
    value = parse_json(read_text(path))
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def write_file(
    path: Path, pieces: Iterable[bytes | bytearray | memoryview], mode: int = 0o666, *, durable: bool = False
) -> None:
    """Write a file that is complete or what it was before; it replaces what has the name, a link too.

    Args:
        mode: its permissions, less those that the umask takes away.
        durable: whether it would survive a power cut when this returns.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name[:100]}-{uuid.uuid4().hex[:8]}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    if durable:
        make_durable(path.parent)


def replace_text(path: Path, text: str, mode: int = 0o666) -> None:
    """`write_file` of a text."""
    write_file(path, [text.encode("utf-8", "surrogateescape")], mode)


def make_durable(folder: Path) -> None:
    """Have the names in a folder reach the disk."""
    with contextlib.suppress(OSError):  # some network file systems have nothing to flush here
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_run_folder(path: Path) -> None:
    """Make a folder of a run, and those above it that are missing, as private as the run's files; it may exist. Raises
    `OSError`."""
    mode = run_file_mode()
    mode |= (mode & 0o444) >> 2
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir(mode, exist_ok=True)


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
