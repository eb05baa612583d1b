"""A finished run, started again: the same line prints its result, and more epochs or steps go on from its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import PacelineError
from paceline.spec import Job, RunRecord
from tests.old.ranks.forked_commands import in_forked_process

JOB = Job.from_mapping(
    {
        "parity": "bitwise",
        "global_batch_size": 200,
        "epochs": 1,
        "data": {"name": "digits", "train_limit": 1000},
        "optim": {"name": "adamw", "lr": 0.01, "warmup_epochs": 0.5},
    }
)


def _train(out: Path, workers: int = 1, **values: Any) -> RunRecord:
    max_steps = values.pop("max_steps", None)
    return paceline.train(JOB.with_values(**values), workers=workers, out=out, max_steps=max_steps)


@pytest.mark.timeout(300)
@in_forked_process
def test_a_finished_run_gives_its_result_again_and_goes_on(tmp_path: Path) -> None:
    whole = _train(tmp_path / "whole", epochs=2)
    first = _train(tmp_path / "parts", max_steps=3, workers=2)
    assert (first.steps, first.weights_sha256 == whole.weights_sha256) == (3, False)
    written = (tmp_path / "parts" / "record.json").stat().st_mtime_ns
    assert _train(tmp_path / "parts", max_steps=3) == first
    assert (tmp_path / "parts" / "record.json").stat().st_mtime_ns == written  # nothing was started
    epoch = _train(tmp_path / "parts")  # no limit any more: the epoch's other two steps
    assert (epoch.steps, len(epoch.epochs)) == (5, 1)
    both = _train(tmp_path / "parts", epochs=2)
    assert (both.steps, both.weights_sha256) == (10, whole.weights_sha256)
    kept = sorted(path.name for path in (tmp_path / "parts").glob("record*.json"))
    assert kept == ["record-3-steps.json", "record-5-steps.json", "record.json"]
    for less in ({"epochs": 1}, {"epochs": 2, "max_steps": 4}, {"epochs": 2, "seed": 1}):
        with pytest.raises(PacelineError, match=r"already holds a finished run (of another job|that is longer)"):
            _train(tmp_path / "parts", **less)


@pytest.mark.timeout(200)
@in_forked_process
def test_a_schedule_that_ends_with_the_epochs_does_not_go_on(tmp_path: Path) -> None:
    optim = {"schedule": "cosine"}
    _train(tmp_path / "run", optim=optim)
    with pytest.raises(PacelineError, match=r"epochs was 1 and is 2 .its learning rates follow a schedule that ends"):
        _train(tmp_path / "run", optim=optim, epochs=2)
    assert _train(tmp_path / "run", optim=optim).steps == 5
