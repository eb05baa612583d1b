"""Decode once, then map: .npy files that all workers of a machine share as one copy in memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import env
from paceline.data.file_lock import file_lock

FORMAT_VERSION = 1
"""Part of every entry's name; a change in what the sources decode to makes it one more."""

Arrays = Mapping[str, NDArray[Any]]


def decoded(name: str, sources: Sequence[Path], decode: Callable[[], Arrays]) -> Arrays:
    """The arrays that `decode()` makes of the files `sources`, as read-only memory maps.

    They live under env.data_dir(), in an entry named after the sources' paths, sizes and times of change:
    other sources make another entry. Workers that start at once decode once, the others wait. Where the cache
    cannot be written, `decode()` is called and its arrays stay in this process.
    """
    entry = env.data_dir() / "decoded" / f"{name}-{_fingerprint(sources)}"
    arrays = _open(entry)
    if arrays is not None:
        return arrays
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(entry.with_name(f".{entry.name}.lock")))
        except OSError:
            return decode()
        arrays = _open(entry)  # another worker may have written it while this one waited
        if arrays is not None:
            return arrays
        fresh = decode()
        try:
            _write(entry, fresh)
        except OSError:
            return fresh
        return _open(entry) or fresh


def _fingerprint(sources: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"format {FORMAT_VERSION}".encode())
    for path in sources:
        stat = path.stat()
        digest.update(f"\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _open(entry: Path) -> Arrays | None:
    """The arrays of an entry; None when there is none, or when it is damaged and should be written anew."""
    try:
        files = sorted(entry.glob("*.npy"))
        return {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in files} or None
    except (OSError, ValueError, EOFError):
        return None


def _write(entry: Path, arrays: Arrays) -> None:
    part = entry.with_name(f".{entry.name}.{os.getpid()}.part")
    try:
        part.mkdir()
        for name, array in arrays.items():
            np.save(part / f"{name}.npy", array, allow_pickle=False)
        shutil.rmtree(entry, ignore_errors=True)  # a damaged entry; a process that has it mapped keeps the pages
        part.rename(entry)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        raise
