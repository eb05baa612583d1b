"""A run as `paceline watch` shows it: from the files of its folder, while it trains and when it has ended."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

import paceline
from paceline.diagnosis.failures import WorkerProcess, write_note
from paceline.hardware import nvml
from paceline.report.watch import read_run
from paceline.spec.record import GpuUse, RunStatus, WorkerStatus


def _write(folder: Path, lr: float, losses: list[float]) -> None:
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({"epochs": 2, "optim": {"lr": lr}}))
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    times = {"step_total_s": 0.01, "step_data_s": 0.001, "step_compute_s": 0.007, "step_exposed_comm_s": 0.002}
    lines.append({"step": len(losses), "samples_per_s": 1234.0, **times})
    lines.append({"step": len(losses), "epoch": 1, "time": time.time(), "train_loss": 0.5, "test_accuracy": 0.875})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 99, "lo')


def _status(folder: Path, when_s: float) -> None:
    worker = WorkerStatus(1, "gpu2", 77, 41, "summing gradients", 2 << 30)
    RunStatus(when_s, (worker,)).save(folder / "workers.json")


def test_a_run_is_shown_as_its_files_tell_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu2")
    monkeypatch.setattr(nvml, "gpu_use", lambda: {77: GpuUse(3, 5 << 30, 0.5)})
    one, other = tmp_path / "one", tmp_path / "other"
    _write(one, 0.1, [2.0, 1.25])
    _write(other, 0.2, [3.0])
    (other / "failure.json").write_text(
        json.dumps({"sentence": "Rank 1 raised ValueError.", "noticed_at": time.time()})
    )
    _status(one, time.time())
    paceline.watch([one, other])
    shown = capsys.readouterr().out
    assert shown.endswith("\n")
    for fact in (
        "training",
        "41",
        "1.25",
        "1,234",
        "10.0 ms",
        "compute 70",
        "exposed communication 20",
        "accuracy 0.875",
        "gpu2",
        "summing gradients",
        "2 GiB",
        "3, 5 GiB, 50% busy",
        "optim.lr",
        "0.1",
        "0.2",
        "Epoch 1: train loss 0.5",
        "Rank 1 raised",
    ):
        assert fact in shown, fact


def test_a_line_that_was_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _write(folder, 0.1, [2.0])
    _status(folder, time.time())
    assert read_run(folder).number("loss") == 2.0
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('ss": 0.125}\n{"step": 100, "loss": NaN}\n')
    run = read_run(folder)
    assert (run.number("step"), run.number("loss")) == (100, None)
    (folder / "record.json").write_text(json.dumps({"steps": 100, "accuracy": 0.9}))
    run = read_run(folder)
    assert (run.state, run.workers) == ("finished", ())
    assert "accuracy 90.00%" in run.sentence


def _age(folder: Path) -> None:
    """Have all that is in the folder be a minute old."""
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (time.time() - 60, time.time() - 60))


def _note(folder: Path, pid: int, exit_code: int | None = None) -> None:
    write_note(folder, WorkerProcess(0, 1, pid, socket.gethostname(), exit_code))


def test_a_run_of_which_nothing_was_heard_is_silent(tmp_path: Path) -> None:
    _write(tmp_path / "run", 0.1, [2.0])
    _status(tmp_path / "run", time.time() - 60)
    _note(tmp_path / "run", os.getpid())  # stopped: those of several workers write every second
    _age(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.state == "silent" and "for 60 s" in run.sentence


def test_a_run_that_starts_or_is_long_in_a_step_is_not_silent_and_a_script_ends(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("starting", "alone", "named", "script", "ended", "stopped")]
    starting, alone, named, script, ended, stopped = folders
    for folder in folders:
        folder.mkdir()
    (starting / "job.json").write_text("{}")
    _note(alone, os.getpid())
    write_note(named, WorkerProcess(0, 1, os.getpid(), "localhost"))  # as of `--hosts localhost`
    _age(alone)
    _age(named)
    _status(script, time.time())
    _note(ended, 1, exit_code=0)
    _note(stopped, 1, exit_code=143)
    states = ["starting", "running", "running", "training", "finished", "stopped"]
    assert [read_run(folder).state for folder in folders] == states
