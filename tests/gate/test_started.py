"""What `paceline train` and `launch` promise beside the tables: a job goes on with its scheduler, its folder takes no
other job, a failure keeps its words, and a call that only one worker makes is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import forked_paceline, paceline, succeeded

JOB = """
global_batch_size = 16
virtual_shards = 2
epochs = 2
parity = "bitwise"
data = { name = "digits", train_limit = 48, test_limit = 16 }
model = { name = "mlp" }
[optim]
scheduler = { name = "torch.optim.lr_scheduler:StepLR", every = "epoch", options = { step_size = 1, gamma = 0.1 } }
"""

EVALUATING_ALONE = """
import torch
import paceline

data = torch.utils.data.TensorDataset(torch.ones(64, 4))
with paceline.init(global_batch_size=8, progress=False) as run:
    model = torch.nn.Linear(4, 2)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.batches(data):
        run.step(batch, lambda model, batch: model(batch[0]).square().mean())
        if run.rank == 0 and run.steps == 2:
            run.evaluate(data, lambda model, batch: {"loss": model(batch[0])[:, 0]})
"""


def _weights_after(folder: Path, out: str, *arguments: str) -> str:
    succeeded(paceline("train", "job.toml", "-n", "1", "--out", out, *arguments, cwd=folder))
    weights: str = json.loads((folder / out / "record.json").read_text())["weights_sha256"]
    return weights


@pytest.mark.budget(processor_s=40)
def test_a_job_in_two_parts_is_the_job_in_one_and_no_other_job(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    part = _weights_after(tmp_path, "two", "--max-steps", "2")  # of three in an epoch
    whole = _weights_after(tmp_path, "whole")
    assert _weights_after(tmp_path, "two") == whole != part
    other = forked_paceline("train", "job.toml", "--out", "two", "--set", "seed=1", cwd=tmp_path)
    assert other.returncode == 2 and "two" in other.stderr and "seed" in other.stderr, other.stderr


def _failure_of(folder: Path, script: str, *options: str) -> dict[str, Any]:
    (folder / "script.py").write_text(script)
    ended = paceline("launch", "-n", "2", "--out", "run", *options, "script.py", cwd=folder)
    assert ended.returncode == 1, ended.stderr
    report: dict[str, Any] = json.loads((folder / "run" / "failure.json").read_text())
    return report


def test_a_message_with_a_null_character_is_told(tmp_path: Path) -> None:
    report = _failure_of(tmp_path, "raise ValueError('half' + chr(0) + 'way')")
    assert report["cause"] == "exception" and "ValueError: half" in report["sentence"], report


@pytest.mark.budget(processor_s=20)
def test_a_call_that_only_one_worker_makes_is_named(tmp_path: Path) -> None:
    report = _failure_of(tmp_path, EVALUATING_ALONE, "--hang-timeout", "5")
    assert report["cause"] in ("mismatch", "hung") and "run.evaluate" in " ".join(report["workers"]), report
