"""One process at a time: a lock on a file, let go by the kernel when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock `path`, making the file and its directory if need be; waits until it is free.

    Raises:
        OSError: the file cannot be made, or its file system knows no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A named pipe is opened for writing alone only when somebody reads from it.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Is no file", str(path))
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
