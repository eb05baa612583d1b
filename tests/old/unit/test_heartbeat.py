"""What a worker shows of itself, read from another process."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.heartbeat import Heartbeat, Source, Vitals, read_vitals

WORKER = """
import os, sys
from pathlib import Path
from paceline.heartbeat import Heartbeat
heartbeat = Heartbeat(Path(sys.argv[1]))
exec(sys.argv[2])
print("shown", flush=True)
sys.stdin.read()
"""


@contextmanager
def worker(path: Path, shows: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has shown something of itself and then stands still."""
    argv = [sys.executable, "-c", WORKER, str(path), shows]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "shown\n"
            yield process
        finally:
            process.kill()


def test_another_process_sees_a_worker_inside_a_collective(tmp_path: Path) -> None:
    began = time.monotonic()
    with worker(
        tmp_path / "heartbeat", "heartbeat.step(3); heartbeat.beat(); heartbeat.enter('paceline', 'ring of bucket 2')"
    ):
        vitals = read_vitals(tmp_path / "heartbeat")
        assert (vitals.step, vitals.collective) == (3, "ring of bucket 2")
        assert vitals.inside_s is not None and vitals.heartbeat_age_s is not None
        assert 0 <= vitals.inside_s <= vitals.heartbeat_age_s <= time.monotonic() - began
        # It stands still, and its times grow.
        later = read_vitals(tmp_path / "heartbeat")
        assert later.inside_s is not None and later.inside_s > vitals.inside_s


def test_a_dead_worker_is_still_read(tmp_path: Path) -> None:
    with worker(tmp_path / "heartbeat", "heartbeat.step(7); heartbeat.enter('torch', 'barrier')") as process:
        process.kill()
        process.wait(10)
        assert read_vitals(tmp_path / "heartbeat").step == 7
        assert read_vitals(tmp_path / "heartbeat").collective == "barrier"


def test_the_shim_and_the_run_of_one_worker_write_to_the_same_file(tmp_path: Path) -> None:
    shim = Heartbeat(tmp_path / "heartbeat")
    shim.beat()
    run = Heartbeat(tmp_path / "heartbeat")
    run.step(0)
    vitals = read_vitals(tmp_path / "heartbeat")
    assert vitals.step == 0
    assert vitals.heartbeat_age_s is not None


def test_nothing_is_known_before_anything_was_said(tmp_path: Path) -> None:
    assert read_vitals(tmp_path / "absent") == Vitals()
    (tmp_path / "half").write_bytes(b"half")
    assert read_vitals(tmp_path / "half") == Vitals()
    Heartbeat(tmp_path / "heartbeat")
    assert read_vitals(tmp_path / "heartbeat") == Vitals()


@pytest.mark.parametrize("begin", [0, 512])
def test_the_first_update_of_a_process_is_told_from_those_before_it(tmp_path: Path, begin: int) -> None:
    heartbeat, path = Heartbeat(tmp_path / "heartbeat"), tmp_path / "heartbeat"
    heartbeat.step(0)
    heartbeat.step(begin)  # of a checkpoint
    assert read_vitals(path).trained_s is None
    before = time.monotonic()
    heartbeat.step(begin + 1)
    after = time.monotonic()
    heartbeat.step(begin + 2)
    read = time.monotonic()
    trained_s = read_vitals(path).trained_s
    assert trained_s is not None and read - after <= trained_s <= time.monotonic() - before
    assert read_vitals(path).step == begin + 2


def test_a_worker_that_saves_before_it_ends_says_so(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    heartbeat.enter("paceline", "all_reduce")
    assert not read_vitals(tmp_path / "heartbeat").is_saving
    heartbeat.save()
    assert read_vitals(tmp_path / "heartbeat").is_saving
    assert read_vitals(tmp_path / "heartbeat").collective == "all_reduce"


def test_a_pulse_is_its_users_alone(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "heartbeat")
    assert stat.S_IMODE((tmp_path / "heartbeat").stat().st_mode) == 0o600


def test_without_a_path_nobody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    heartbeat = Heartbeat(None)
    heartbeat.step(1)
    heartbeat.beat()
    heartbeat.enter("torch", "all_reduce")
    heartbeat.leave("torch")
    assert not list(tmp_path.iterdir())


def test_what_a_worker_has_left_stays_readable(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    heartbeat.enter("torch", "broadcast")
    heartbeat.leave("torch")
    assert read_vitals(tmp_path / "heartbeat") == Vitals(collective="broadcast")
    heartbeat.enter("torch", "all_gather")
    assert read_vitals(tmp_path / "heartbeat").collective == "all_gather"


@pytest.mark.parametrize(("first", "second"), [("paceline", "torch"), ("torch", "paceline")])
def test_of_two_that_wait_the_longer_one_is_told(tmp_path: Path, first: Source, second: Source) -> None:
    heartbeat, now = Heartbeat(tmp_path / "heartbeat"), time.monotonic()
    heartbeat.enter(first, "long", since=now - 30)
    heartbeat.enter(second, "short", since=now - 10)
    vitals = read_vitals(tmp_path / "heartbeat")
    assert vitals.collective == "long"
    assert vitals.inside_s is not None and 30 <= vitals.inside_s <= 30 + time.monotonic() - now
    # The one that still waits counts, however little it says.
    heartbeat.leave(first)
    assert read_vitals(tmp_path / "heartbeat").collective == "short"


@given(st.text(max_size=400))
def test_any_name_is_read_back_as_far_as_there_is_room(
    tmp_path_factory: pytest.TempPathFactory, collective: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "named"
    Heartbeat(path).enter("paceline", collective)
    seen = read_vitals(path).collective
    whole = collective.rstrip("\0")
    if len(collective.encode()) <= 240:
        assert seen == whole
    else:
        assert seen and whole.startswith(seen.rstrip("\N{REPLACEMENT CHARACTER}"))
        assert len(seen) <= 240
