"""One run at a time in a folder: it keeps a file there locked, and the lock ends with its process, however that ends.

The locks are those of POSIX (`fcntl.lockf`), which shared file systems have between nodes, too, and which the children
of a process do not inherit. Where a file system has none, nothing is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from paceline.errors import LaunchError

RUN_LOCK, CHECKPOINTS_LOCK = ".run.lock", ".checkpoints.lock"
"""A launcher locks the folder of a run, its first worker the one of the checkpoints, which may be the same."""

_PATIENCE_S = 3.0
"""How long a process that was killed may take to be gone."""

_held: dict[Path, str] = {}
"""What this process has locked, with the text in it. The kernel would let it lock the same file again, and would unlock
the file once it has read it."""


@contextlib.contextmanager
def hold_folder(folder: Path, name: str = RUN_LOCK) -> Iterator[None]:
    """Let no other run use the folder, which exists, while the block is open.

    Raises:
        LaunchError: another run uses it; says which.
        OSError: nothing can be written there.
    """
    path = folder.resolve() / name
    with _locked(path, _PATIENCE_S) as file:
        _held[path] = f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        try:
            file.truncate(0)
            file.write(_held[path])
            file.flush()
            yield
        finally:
            with contextlib.suppress(OSError):  # an exception of the block counts more
                path.unlink()
            del _held[path]


def check_free(folder: Path) -> None:
    """Raise the `LaunchError` of `hold_folder` if a run uses the folder; takes nothing."""
    path = folder.resolve() / RUN_LOCK
    if path.exists():
        with contextlib.suppress(OSError):
            _locked(path, 0.0).close()


def _locked(path: Path, patience_s: float) -> IO[str]:
    until = time.monotonic() + patience_s
    while path not in _held:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - it is locked as long as it is open
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno in (errno.EACCES, errno.EAGAIN):  # another process has locked it
                file.seek(0)
                holder = file.read(1000)
                file.close()
                if time.monotonic() >= until:
                    raise _in_use(path, holder) from None
                time.sleep(0.05)
                continue
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # whoever had locked it has just removed it
    raise _in_use(path, _held[path])


def _in_use(path: Path, holder: str) -> LaunchError:
    return LaunchError(
        f"{path.parent} is in use by {holder or 'another run'}; wait for its end, or choose another folder."
    )
