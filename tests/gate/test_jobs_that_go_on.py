"""A job that was stopped in the middle of an epoch goes on as if it had not been, with its scheduler; its folder takes
no other job."""

from __future__ import annotations

import json
from pathlib import Path

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


def _weights_after(folder: Path, out: str, *arguments: str) -> str:
    succeeded(paceline("train", "job.toml", "-n", "1", "--out", out, *arguments, cwd=folder))
    weights: str = json.loads((folder / out / "record.json").read_text())["weights_sha256"]
    return weights


@pytest.mark.budget(processor_s=40)
def test_a_job_in_two_parts_is_the_job_in_one_and_no_other_job(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    part = _weights_after(tmp_path, "two", "--max-steps", "2")
    whole = _weights_after(tmp_path, "whole")
    assert _weights_after(tmp_path, "two") == whole != part
    other = forked_paceline("train", "job.toml", "--out", "two", "--set", "seed=1", "--dry-run", cwd=tmp_path)
    assert other.returncode == 2 and "two" in other.stderr and "seed" in other.stderr, other.stderr
