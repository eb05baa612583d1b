"""Experiment trackers with their real packages, offline: what a run logs lies on this machine's disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.old.ranks.command_line import paceline, succeeded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUN = ("train", "digits-lenet", "-n", "1", "--max-steps", "4", "--quiet", "--out", "run")


def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    succeeded(paceline(*RUN, "--track", "tensorboard", cwd=tmp_path, timeout_s=250))
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb, of the extra of its name")
    done = paceline(*RUN, "--track", "wandb", cwd=tmp_path, timeout_s=250, WANDB_MODE="offline", HOME=str(tmp_path))
    succeeded(done)
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    written = log.read_bytes()
    assert b"samples_seen" in written and b"test_accuracy" in written


def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow-skinny, of the extra mlflow")
    folder = tmp_path / "tracked"
    environment = {"MLFLOW_TRACKING_URI": folder.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    succeeded(paceline(*RUN, "--track", "mlflow", cwd=tmp_path, timeout_s=250, **environment))
    (losses,) = folder.glob("*/*/metrics/loss")
    steps = [int(line.split()[-1]) for line in losses.read_text(encoding="utf-8").splitlines()]
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [line["step"] for line in logged if "loss" in line]
