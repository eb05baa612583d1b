"""One run at a time in a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline import run_lease
from paceline.errors import LaunchError
from paceline.run_lease import LEASE_FILE, Lease, hold_folder, own_lease, run_token, temporary_folder

HOLDER = """
import sys
from pathlib import Path
from paceline.run_lease import hold_folder
with hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def _holder(folder: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_refused_in_one_sentence_until_the_first_has_ended(tmp_path: Path) -> None:
    with _holder(tmp_path) as first:
        sentence = rf"in use by process {first.pid} on .* choose another folder\."
        with pytest.raises(LaunchError, match=sentence), hold_folder(tmp_path):
            pass
        first.communicate()
    with hold_folder(tmp_path):
        assert run_token(tmp_path)
    assert not list(tmp_path.iterdir()) and run_token(tmp_path) == ""


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    with _holder(tmp_path) as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert (tmp_path / LEASE_FILE).exists()
        with hold_folder(tmp_path):
            pass


def test_a_process_that_has_the_number_of_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    dataclasses.replace(own_lease("a"), process_started="1").save(tmp_path / LEASE_FILE)
    with hold_folder(tmp_path):
        pass


def test_processes_of_one_run_follow_each_other(tmp_path: Path) -> None:
    with _holder(tmp_path) as first:
        with hold_folder(tmp_path, run_token(tmp_path)):
            assert Lease.load(tmp_path / LEASE_FILE).pid == os.getpid()
        first.communicate()


def test_a_run_on_another_node_that_is_renewed_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = dataclasses.replace(own_lease("there"), node="elsewhere")
    there.save(tmp_path / LEASE_FILE)
    said: list[str] = []
    renewals = iter(range(1, 1000))
    monkeypatch.setattr(
        "time.sleep", lambda _s: dataclasses.replace(there, count=next(renewals)).save(tmp_path / LEASE_FILE)
    )
    with pytest.raises(LaunchError, match="on elsewhere since"), hold_folder(tmp_path, say=said.append):
        pass
    assert "looking for" in said[0]


def test_a_run_on_another_node_that_stands_still_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataclasses.replace(own_lease("there"), node="elsewhere").save(tmp_path / LEASE_FILE)
    monkeypatch.setattr(run_lease, "_STANDSTILL_S", 0.01)
    with hold_folder(tmp_path, say=lambda _line: None):
        assert Lease.load(tmp_path / LEASE_FILE).node != "elsewhere"


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff"])
def test_a_file_that_says_nothing_holds_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LEASE_FILE).write_bytes(content)
    with hold_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", no_links)
    with hold_folder(tmp_path), pytest.raises(LaunchError), hold_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_without_links_a_lease_that_is_being_written_is_not_taken_for_one_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[str] = []
    flock, is_waiting = fcntl.flock, threading.Event()

    def no_links(*_: object) -> None:
        raise PermissionError("no links here")

    def flock_and_tell(descriptor: int, operation: int) -> None:
        try:
            flock(descriptor, operation)
        except BlockingIOError:
            is_waiting.set()
            raise

    def attempt() -> None:
        try:
            with hold_folder(tmp_path):
                outcomes.append("held")
        except LaunchError:
            outcomes.append("refused")
        is_waiting.set()

    class Slow(io.TextIOWrapper):
        def write(self, text: str) -> int:
            threads[0].start()
            is_waiting.wait(30)  # the other has read the file, which is empty, or has ended
            return super().write(text)

    def open_slowly(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode == "x" and not threads:
            threads.append(threading.Thread(target=attempt))
            return Slow(open(path, "xb"), **options)
        return open(path, mode, **options)

    threads: list[threading.Thread] = []
    monkeypatch.setattr("os.link", no_links)
    monkeypatch.setattr("fcntl.flock", flock_and_tell)
    monkeypatch.setattr(Path, "open", open_slowly)
    with hold_folder(tmp_path):
        threads[0].join()
    assert outcomes == ["refused"]


@pytest.mark.parametrize("left", ["nothing", "a lease of a dead process"])
def test_of_many_at_once_one_gets_it(tmp_path: Path, left: str) -> None:
    if left != "nothing":
        dataclasses.replace(own_lease("dead"), process_started="1").save(tmp_path / LEASE_FILE)
    start, end, outcomes = threading.Barrier(8), threading.Event(), []

    def note(outcome: str) -> None:
        outcomes.append(outcome)
        if len(outcomes) == 8:
            end.set()

    def attempt() -> None:
        start.wait()
        try:
            with hold_folder(tmp_path):
                note("held")  # it may be the last
                end.wait(30)
        except LaunchError:
            note("refused")

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held"] + ["refused"] * 7


def test_of_three_that_find_a_dead_lease_one_after_the_other_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second takes the folder after the first has read the dead lease, the third while the first removes it."""
    dataclasses.replace(own_lease("dead"), process_started="1").save(tmp_path / LEASE_FILE)
    read, rename = run_lease._read, Path.rename
    held: list[None] = []

    def read_and_be_overtaken(path: Path) -> Lease | None:
        found = read(path)
        monkeypatch.setattr(run_lease, "_read", read)
        held.append(ends.enter_context(hold_folder(tmp_path)))
        monkeypatch.setattr(Path, "rename", rename_and_be_overtaken)
        return found

    def rename_and_be_overtaken(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if path.name == LEASE_FILE:
            monkeypatch.setattr(Path, "rename", rename)
            held.append(ends.enter_context(hold_folder(tmp_path)))
        return renamed

    with contextlib.ExitStack() as ends:
        monkeypatch.setattr(run_lease, "_read", read_and_be_overtaken)
        for _ in ("first", "third"):
            with contextlib.suppress(LaunchError):
                held.append(ends.enter_context(hold_folder(tmp_path)))
        assert len(held) == 1


@pytest.mark.parametrize("obstacle", ["no locks", "locked by somebody"])
def test_a_dead_lease_goes_where_the_folder_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    dataclasses.replace(own_lease("dead"), process_started="1").save(tmp_path / LEASE_FILE)
    monkeypatch.setattr(run_lease, "_LOCK_WAIT_S", 0.0)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    if obstacle == "no locks":
        monkeypatch.setattr("fcntl.flock", no_locks)
    with hold_folder(tmp_path), pytest.raises(LaunchError), hold_folder(tmp_path):
        pass
    os.close(descriptor)
    assert not list(tmp_path.iterdir())


def test_it_is_renewed_and_another_one_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lease, "_RENEWAL_S", 0.01)
    with hold_folder(tmp_path):
        while Lease.load(tmp_path / LEASE_FILE).count < 3:
            pass
        (tmp_path / LEASE_FILE).unlink()
        other = own_lease("another")
        other.save(tmp_path / LEASE_FILE)
    assert Lease.load(tmp_path / LEASE_FILE) == other


def test_a_lease_that_was_removed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lease, "_RENEWAL_S", 0.01)
    folder = tmp_path / "run"
    folder.mkdir()
    with hold_folder(folder):
        shutil.rmtree(folder)
        folder.mkdir()  # as a worker does that saves into it
        while not (folder / LEASE_FILE).exists():
            pass
        with pytest.raises(LaunchError), hold_folder(folder):
            pass


def test_a_run_that_was_stopped_is_told_that_another_has_taken_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "_RENEWAL_S", 0.01)
    told = threading.Event()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        told.set()

    with hold_folder(tmp_path, say=say):
        dataclasses.replace(own_lease("another"), node="elsewhere").save(tmp_path / LEASE_FILE)
        assert told.wait(30)
    assert "was taken by process" in said[0] and "on elsewhere" in said[0] and len(said) == 1
    assert Lease.load(tmp_path / LEASE_FILE).token == "another"


def test_temporary_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, node in (("paceline-killed", own_lease("").node), ("paceline-elsewhere", "another node")):
        (tmp_path / name).mkdir()
        dataclasses.replace(own_lease("temporary"), node=node, process_started="1").save(tmp_path / name / LEASE_FILE)
    (tmp_path / "paceline-somebody").mkdir()
    (tmp_path / "paceline-link").symlink_to(tmp_path / "paceline-elsewhere")
    with temporary_folder("paceline-") as one, temporary_folder("paceline-") as two:
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"paceline-elsewhere", "paceline-somebody", "paceline-link", Path(one).name, Path(two).name}
