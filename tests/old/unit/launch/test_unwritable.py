"""A run folder that cannot be written to hides no cause and loses no report."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paceline import env
from paceline.errors import LaunchError
from paceline.launch import worker
from paceline.launch.failure_report import FailureReport
from paceline.launch.failures import Failure, failure_path, spare_failure_path
from paceline.launch.run_workers import _marker_in, worker_failed


def test_a_worker_leaves_its_note_beside_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").write_text("a file")
    monkeypatch.setenv(env.HEARTBEAT, str(tmp_path / "rank1"))
    worker.report(ValueError("the cause"), 1, tmp_path / "run")
    note = Failure.read(spare_failure_path(tmp_path / "rank1"))
    assert note is not None and (note.message, note.pid) == ("the cause", os.getpid())


def test_a_folder_that_was_deleted_meanwhile_takes_the_marker_with_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with _marker_in(run_dir) as marker:
        assert (run_dir / marker).exists()
        shutil.rmtree(run_dir)
    with pytest.raises(LaunchError, match="cannot be written to: No such file"), _marker_in(run_dir):
        pass


def test_an_exception_s_text_has_a_bound(tmp_path: Path) -> None:
    worker.report(ValueError("begin" + "x" * 50_000_000 + "end"), 1, tmp_path)
    note = Failure.read(tmp_path / "failures" / "rank1.json")
    assert note is not None and note.message.startswith("begin") and note.message.endswith("end")
    assert len(note.message) <= worker.MOST_MESSAGE_CHARACTERS and len(note.traceback) < 200_000


def test_a_note_of_text_that_no_file_name_could_hold_is_read(tmp_path: Path) -> None:
    worker.report(ValueError("null \0 and half \ud800"), 1, tmp_path)
    note = Failure.read(failure_path(tmp_path, 1))
    assert note is not None and note.message == "null \\x00 and half \\ud800"
    assert note.traceback.endswith("ValueError: null \\x00 and half \\ud800\n")


def test_a_report_goes_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").write_text("a file")
    monkeypatch.chdir(tmp_path)
    report = FailureReport("exception", "Rank 0 failed.", (0,), "", 1, 1, 2, 0.0, "Look.", "the cause", ())
    error = worker_failed(report, report.save(tmp_path / "run"))
    assert error.report is not None and error.report.read_text() == report.text()
    assert error.report.parent.name.startswith("run-saved-")
    assert str(error).startswith(report.sentence)
