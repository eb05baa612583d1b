"""What workers write, on its way to logs and terminal."""

from __future__ import annotations

import os
import threading
import tracemalloc
from pathlib import Path

import pytest

from paceline.launch.output import LONGEST_LINE_BYTES, LinePump, harmless, is_behind, show_here


class Shown:
    """Counts what is shown, and keeps a little of it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.longest = 0
        self.first = b""

    def __call__(self, _target_fd: int, lines: bytes) -> None:
        self.num_bytes += len(lines)
        self.longest = max(self.longest, len(lines))
        self.first = self.first or lines[:100]


def pumped(log: Path, prefix: bytes | None, *writes: bytes) -> Shown:
    """The worker of rank 1 writes this to its standard output, and ends."""
    shown = Shown()
    pump = LinePump(shown)
    with pump.pipes(1, prefix=prefix, log=log.open("wb", 0)) as (out, _):
        worker = os.fdopen(os.dup(out), "wb", 0)
    pump.start()
    with worker:
        for data in writes:
            worker.write(data)
    pump.close()
    return shown


@pytest.mark.parametrize("prefix", [b"[rank 1] ", None], ids=["shown", "log alone"])
def test_memory_is_bounded_however_long_a_line_is(tmp_path: Path, prefix: bytes | None) -> None:
    num_megabytes = 100
    megabyte = b"x" * 1_000_000
    tracemalloc.start()
    try:
        shown = pumped(tmp_path / "log", prefix, *([megabyte] * num_megabytes))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
    assert (tmp_path / "log").stat().st_size == num_megabytes * len(megabyte)
    if prefix is None:
        assert shown.num_bytes == 0
    else:
        assert shown.num_bytes > num_megabytes * len(megabyte)  # prefixes and line ends come to it
        assert shown.first.startswith(b"[rank 1] xxx")
        assert shown.longest < 4 * LONGEST_LINE_BYTES


def test_lines_are_shown_whole_and_the_last_gets_its_end(tmp_path: Path) -> None:
    shown = pumped(tmp_path / "log", b"> ", b"one\ntw", b"o\n10 %\r", b"20 %\rend")
    assert shown.first.startswith(b"> one\n")
    assert shown.num_bytes == len(b"> one\n> two\n> 10 %\r> 20 %\r> end\n")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n10 %\r20 %\rend"


def test_a_pipe_that_nobody_reads_is_behind() -> None:
    read_end, write_end = os.pipe()
    try:
        assert not is_behind(read_end) and not is_behind(write_end)
        os.write(write_end, bytes(40_000))
        assert is_behind(read_end) and is_behind(write_end)
        os.read(read_end, 30_000)
        assert not is_behind(write_end)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_pump_that_cannot_show_is_behind(tmp_path: Path) -> None:
    may_show = threading.Event()

    def show(_target_fd: int, _lines: bytes) -> None:
        may_show.wait(30)

    pump = LinePump(show)
    with pump.pipes(3, prefix=b"", log=(tmp_path / "log").open("wb", 0)) as (out, _):
        worker = os.fdopen(os.dup(out), "wb", 0)
    pump.start()
    with worker:
        worker.write(b"one line\n" + bytes(100_000))
        assert pump.is_behind(3) and not pump.is_behind(2)
        may_show.set()
    pump.close()
    assert not pump.is_behind(3)


def test_a_file_is_never_behind(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(100_000))
        assert not is_behind(file.fileno())


def test_on_a_terminal_lines_take_the_place_of_the_progress_line() -> None:
    """Rank 0 draws it on the same terminal, and leaves the cursor at its beginning."""
    reader, terminal = os.openpty()
    try:
        os.write(terminal, b"\r\x1b[2Kstep 3/100\r")
        show_here(terminal, b"[rank 1] hello\n")
        written = b"\r\x1b[2Kstep 3/100\r\x1b[K[rank 1] hello\r\n"
        shown = b""
        while len(shown) < len(written):
            shown += os.read(reader, 1000)
        assert shown == written
    finally:
        os.close(reader)
        os.close(terminal)


def test_escape_sequences_of_workers_do_not_reach_the_terminal() -> None:
    line = b"\x1b]0;title\x07\x1b[31mred\x1b[0m \x1b[2J\ttab\x00 caf\xc3\xa9\r\n"
    assert harmless(line) == b"\\x1b]0;title\\x07\x1b[31mred\x1b[0m \\x1b[2J\ttab\\x00 caf\xc3\xa9\r\n"
