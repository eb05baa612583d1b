"""What `paceline launch` promises beside the tables: a failure keeps its words, a call that one worker alone makes is
named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import paceline

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

TOLD_FOR_EVER = """
import time
from types import SimpleNamespace
from paceline.env import WorkerFacts
from paceline.train import peers

peers.OTHERS_S = 0.1
peers._watches.append(SimpleNamespace(tell=lambda failure: time.sleep(1000.0)))
peers.tell_failures(WorkerFacts(rank=1, world_size=2, init_method="tcp://127.0.0.1:1"))
raise ValueError("sample 17 is damaged")
"""


def _failure_of(folder: Path, script: str, *options: str) -> dict[str, Any]:
    (folder / "script.py").write_text(script)
    ended = paceline("launch", "-n", "2", "--out", "run", *options, "script.py", cwd=folder)
    assert ended.returncode == 1, ended.stderr
    report: dict[str, Any] = json.loads((folder / "run" / "failure.json").read_text())
    return report


def test_a_run_that_is_not_closed_ends_without_a_word() -> None:
    """As in an interactive interpreter."""
    words = [sys.executable, "-c", "import paceline; run = paceline.init(global_batch_size=8)"]
    assert subprocess.run(words, check=True, capture_output=True).stderr == b""


def test_a_worker_ends_though_the_store_of_a_stopped_rank_0_answers_nobody() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOLD_FOR_EVER], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and "ValueError: sample 17" in done.stderr, done.stderr


def test_a_message_with_a_null_character_is_told(tmp_path: Path) -> None:
    report = _failure_of(tmp_path, "raise ValueError('half' + chr(0) + 'way')")
    assert report["cause"] == "exception" and "ValueError: half" in report["sentence"], report


@pytest.mark.budget(processor_s=20)
def test_a_call_that_only_one_worker_makes_is_named(tmp_path: Path) -> None:
    report = _failure_of(tmp_path, EVALUATING_ALONE, "--hang-timeout", "5")
    assert report["cause"] in ("mismatch", "hung") and "run.evaluate" in " ".join(report["workers"]), report
