"""Shows the output lines of many workers on one terminal, each after its rank.

Time is linear in the workers' output, and memory is bounded by `LONGEST_LINE_BYTES` per stream.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import selectors
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from paceline.errors import LaunchError
from paceline.words import number_of

CHUNK_BYTES = 1 << 16

LONGEST_LINE_BYTES = 1 << 16
"""A longer line is shown as several lines; the log has it unbroken."""

_FILES_OF_A_WORKER = 3
"""Files that stay open for each worker whose output is shown: two pipes, and its log."""
_FILES_BESIDE = 32
"""Files that this process has open besides."""

_ERASE_REST = b"\x1b[K"
"""Erases a terminal's line from the cursor on."""

_CONTROLS = re.compile(rb"\x1b\[[0-9;]*[mK]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Colours of text and the erasing of a line, whole, or single control characters."""

Show = Callable[[int, bytes], None]
"""Shows whole lines on standard output (1) or standard error (2)."""


def show_here(target_fd: int, lines: bytes) -> None:
    """Show lines on this process's own streams; a closed reader is ignored."""
    # On a terminal, rank 0's progress line may stand there, with the cursor at its beginning.
    rest = memoryview(_ERASE_REST + lines if os.isatty(target_fd) else lines)
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(target_fd, rest) :]


PIPE_BYTES = 1 << 16
"""The capacity of a pipe on Linux."""


def is_behind(descriptor: int) -> bool:
    """Whether a pipe is so full that its writer may have to wait; `descriptor` may be either end."""
    try:
        (num_bytes,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    except OSError:
        return False  # a file, or nothing
    return bool(num_bytes >= PIPE_BYTES // 2)


@dataclass
class _Stream:
    source: IO[bytes]
    prefix: bytes | None
    """The prefix of every line; None: write to the log only."""
    target_fd: int
    log: IO[bytes]
    rank: int
    unfinished: bytes = b""
    """The beginning of a line that is not complete yet."""


class LinePump:
    """One thread that copies the output of all workers: unchanged to their logs, line by line to `show`.

    It runs from `start` to `close`; `pipes` is called before `start`.
    """

    def __init__(self, show: Show = show_here) -> None:
        self._show_lines = show
        self._selector = selectors.DefaultSelector()
        self._logs: list[IO[bytes]] = []
        self._streams: list[_Stream] = []
        self._stop_read, self._stop_write = os.pipe()
        self._selector.register(self._stop_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="worker-output", daemon=True)

    @contextlib.contextmanager
    def pipes(self, rank: int, *, prefix: bytes | None, log: IO[bytes]) -> Iterator[list[int]]:
        """While the block is open, write ends of pipes for a worker's standard output and error.

        What comes through them is copied to `log`, which this pump will close, and shown behind `prefix`.
        """
        self._logs.append(log)
        with contextlib.ExitStack() as at_end:
            ends = []
            for target_fd in (1, 2):
                read_end, write_end = os.pipe()
                at_end.callback(os.close, write_end)
                ends.append(write_end)
                stream = _Stream(os.fdopen(read_end, "rb", buffering=0), prefix, target_fd, log, rank)
                self._streams.append(stream)
                self._selector.register(stream.source, selectors.EVENT_READ, stream)
            yield ends

    def start(self) -> None:
        self._thread.start()

    def is_behind(self, rank: int) -> bool:
        """Whether the worker may be blocked until this pump, or the reader behind it, reads its output."""
        sources = [stream.source for stream in self._streams if stream.rank == rank]
        return any(is_behind(source.fileno()) for source in sources if not source.closed)

    def close(self) -> None:
        """Copy the remaining output and stop; later output of workers is lost."""
        os.write(self._stop_write, b".")
        if self._thread.ident is not None:
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._finish(key.data)  # held open by a process that left its group
        self._selector.close()
        for log in self._logs:
            log.close()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def _run(self) -> None:
        is_stopping = False
        while True:
            ready = [key for key, _ in self._selector.select(0 if is_stopping else None)]
            if is_stopping and not ready:
                return
            for key in ready:
                if key.data is not None:
                    self._copy(key.data)
                else:
                    is_stopping = True
                    self._selector.unregister(self._stop_read)

    def _copy(self, stream: _Stream) -> None:
        chunk = os.read(stream.source.fileno(), CHUNK_BYTES)
        if not chunk:
            self._finish(stream)
            return
        # A full disk must not stop the worker, which would block on a full pipe.
        with contextlib.suppress(OSError):
            stream.log.write(chunk)
        if stream.prefix is None:
            return
        lines = (stream.unfinished + chunk).splitlines(keepends=True)  # progress bars end theirs with \r
        stream.unfinished = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        if len(stream.unfinished) >= LONGEST_LINE_BYTES:
            lines.append(stream.unfinished + b"\n")
            stream.unfinished = b""
        self._show(stream, lines)

    def _finish(self, stream: _Stream) -> None:
        if stream.unfinished:
            self._show(stream, [stream.unfinished + b"\n"])
        self._selector.unregister(stream.source)
        stream.source.close()

    def _show(self, stream: _Stream, lines: list[bytes]) -> None:
        if stream.prefix is not None and lines:
            self._show_lines(stream.target_fd, b"".join(stream.prefix + harmless(line) for line in lines))


def check_open_files(num_workers: int) -> None:
    """Raise `LaunchError` where this process may not have as many files open as the output of so many workers needs."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_BESIDE + _FILES_OF_A_WORKER * num_workers
    if most != resource.RLIM_INFINITY and needed > most:
        room = max(0, (most - _FILES_BESIDE) // _FILES_OF_A_WORKER)
        raise LaunchError(
            f"{number_of(num_workers, 'worker')} on one node need {needed:,} open files, and a process may have "
            f"{most:,} here: ask for {number_of(room, 'worker')} at most, or raise the limit with ulimit -n."
        )


def harmless(line: bytes) -> bytes:
    """A line whose control characters are written in words (ESC as \\x1b), but for colours, tabs and ends of lines.

    Escape sequences could move to other workers' lines, change the title, or have the terminal type an answer.
    """
    return _CONTROLS.sub(lambda found: found.group() if len(found.group()) > 1 else b"\\x%02x" % found.group()[0], line)
