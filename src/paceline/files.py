"""Files that are complete or what they were before, the permissions of what a run writes, and one run at a time in a
folder.

A run keeps a file of its folder locked, and the lock ends with its process, however that ends. The locks are those of
POSIX (`fcntl.lockf`), which shared file systems have between nodes, too, and which the children of a process do not
inherit. Where a file system has none, nothing is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.errors import LaunchError

RUN_LOCK, CHECKPOINTS_LOCK = ".run.lock", ".checkpoints.lock"
"""A launcher locks the folder of a run, its first worker the one of the checkpoints, which may be the same."""

_PATIENCE_S = 3.0
"""How long a process that was killed may take to be gone."""
_held: set[Path] = set()
"""What this process has locked: the kernel would let it lock a file again, and unlock it when either is closed."""


def write_file(
    path: Path, pieces: Iterable[bytes | bytearray | memoryview], mode: int = 0o666, *, durable: bool = False
) -> None:
    """Write a file that is complete or what it was before; it replaces what has the name, a link too. Raises `OSError`
    where it cannot be written.

    Args:
        mode: its permissions, less those that the umask takes away.
        durable: whether it would survive a power cut when this returns.
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
    # Not by os.umask, which sets one to ask: other threads would make files meanwhile, or ask and set that one again.
    found = re.search(r"^Umask:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    umask = int(found[1], 8) if found else 0o077
    return 0o600 if umask & 0o020 else 0o666 & ~umask


@contextlib.contextmanager
def lock_folder(folder: Path, name: str = RUN_LOCK) -> Iterator[None]:
    """Let no other run use the folder, which exists, while the block is open. The file that is locked stays.

    Raises:
        LaunchError: another run uses it; says which.
        OSError: nothing can be written there.
    """
    path = folder.resolve() / name
    if path in _held:
        raise LaunchError(f"{folder} is in use by another run of this process; end that first, or choose another one.")
    deadline = time.monotonic() + _PATIENCE_S
    with open(os.open(path, os.O_RDWR | os.O_CREAT, run_file_mode()), "r+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):  # another process has locked it, maybe one that was just killed
                if time.monotonic() >= deadline:
                    what = f"{folder} is in use by {file.read(1000) or 'another run'}"
                    raise LaunchError(f"{what}; wait for its end, or choose another folder.") from None
                time.sleep(0.05)
            except OSError:  # no locks in this file system
                break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        _held.add(path)
        try:
            yield
        finally:
            _held.remove(path)
