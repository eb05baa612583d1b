"""A file is complete or what it was before, and a folder has one run at a time, until its process ends, however."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import files
from paceline.errors import LaunchError
from paceline.files import lock_folder, run_file_mode, write_file

HOLDER = """
import os, sys, time
from pathlib import Path
from paceline import files
files._PATIENCE_S = 0.1
with files.lock_folder(Path(sys.argv[1])):
    if os.fork():
        print("held", flush=True)
    time.sleep(60)
"""
"""A process with a child, which inherits what it has open."""


@pytest.mark.parametrize("as_it_was", [None, b"before"])
def test_a_file_whose_writing_fails_is_what_it_was_before(tmp_path: Path, as_it_was: bytes | None) -> None:
    path = tmp_path / "file"
    if as_it_was is not None:
        path.write_bytes(as_it_was)

    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_file(path, pieces(), durable=True)
    assert [one.read_bytes() for one in tmp_path.iterdir()] == ([] if as_it_was is None else [as_it_was])
    write_file(path, [b"whole"], 0o600)
    assert path.read_bytes() == b"whole" and path.stat().st_mode & 0o777 == 0o600


def test_asking_for_the_mode_of_a_file_sets_no_umask(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o002)  # for all threads of this process
    monkeypatch.setattr(os, "umask", pytest.fail)
    try:
        assert run_file_mode() == 0o664
    finally:
        monkeypatch.undo()
        os.umask(before)


def test_a_folder_is_held_until_its_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PATIENCE_S", 0.1)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(LaunchError, match=f"process {holder.pid} on "), lock_folder(tmp_path):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    monkeypatch.setattr(files, "_PATIENCE_S", 60.0)
    with lock_folder(tmp_path):
        again = subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path)], capture_output=True, text=True)
        assert f"process {os.getpid()} on " in again.stderr
