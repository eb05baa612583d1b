"""A job from its first step to its last: trained on two workers, found equal to one by `paceline verify`, and continued
on one worker, with its scheduler, to the weights of a run that was never interrupted. Its folder takes no other job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import forked_paceline, paceline, succeeded

pytestmark = [pytest.mark.timeout(900), pytest.mark.budget(processor_s=45)]

SETTINGS = {
    "parity": "bitwise",
    "plan.threads_per_worker": "1",
    "optim.schedule": "constant",
    "optim.warmup_epochs": "0",
    "optim.scheduler.name": "torch.optim.lr_scheduler:StepLR",
    "optim.scheduler.every": "epoch",
    "optim.scheduler.options.step_size": "1",
    "optim.scheduler.options.gamma": "0.1",
}
JOB = ("digits-lenet", *(word for item in SETTINGS.items() for word in ("--set", "=".join(item))), "--json")


def train(folder: Path, run: str, workers: int, max_steps: int) -> dict[str, Any]:
    """The summary that a training command ends with."""
    size = ("-n", str(workers), "--max-steps", str(max_steps), "--out", run)
    summary: dict[str, Any] = json.loads(succeeded(paceline("train", *JOB, *size, cwd=folder)).stdout)
    return summary


def test_a_run_resumed_on_one_worker_ends_with_the_weights_of_an_uninterrupted_run(tmp_path: Path) -> None:
    begun = train(tmp_path, "resumed", workers=2, max_steps=30)
    # An epoch of the 1,438 samples has 23 steps of 64 samples, the last one of 30.
    assert (begun["world_size"], begun["steps"], begun["samples_seen"]) == (2, 30, 1438 + 7 * 64)
    resumed = train(tmp_path, "resumed", workers=1, max_steps=40)
    uninterrupted = train(tmp_path, "uninterrupted", workers=1, max_steps=40)
    assert begun["weights_sha256"] != resumed["weights_sha256"]
    for fact in ("weights_sha256", "steps", "samples_seen", "accuracy", "loss"):
        assert resumed[fact] == uninterrupted[fact], fact
    for part in ("job.json", "record.json", "metrics.jsonl", "model.safetensors", "checkpoints"):
        assert (tmp_path / "resumed" / part).exists()
    other = forked_paceline("train", *JOB, "--out", "resumed", "--set", "seed=1", cwd=tmp_path)
    assert other.returncode == 2 and "resumed" in other.stderr and "seed" in other.stderr, other.stderr


def test_verify_finds_two_workers_equal_to_one(tmp_path: Path) -> None:
    verify = ("verify", "digits-lenet", "--workers", "1,2", "--steps", "2", "--json")
    verdict = json.loads(succeeded(paceline(*verify, cwd=tmp_path)).stdout)
    assert (verdict["workers"], verdict["outcome"]) == (2, "equal")
