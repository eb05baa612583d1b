"""`paceline verify SCRIPT` trains it on each number of workers, on the smallest twice, always in new processes; it says
what differs first, and why, and ends with 1 if anything does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import TRACEBACK, paceline

SCRIPT = """\
import torch
import paceline

draw = torch.Generator().manual_seed(0)
samples = [(torch.randn(4, generator=draw), number % 3) for number in range(16)]
scale = 1.0
with paceline.init(global_batch_size=8, virtual_shards=2, epochs=1, precision="float64", progress=False) as run:
    {change}
    model = torch.nn.Linear(4, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.batches(samples):
        run.step(batch, lambda model, shard: torch.nn.functional.cross_entropy(model(shard[0]), shard[1]) * scale)
"""


def _verify(folder: Path, change: str, workers: str) -> list[dict[str, Any]]:
    (folder / "mine.py").write_text(SCRIPT.format(change=change))
    result = paceline("verify", "mine.py", "--workers", workers, "--steps", "2", "--json", cwd=folder)
    assert result.stdout and TRACEBACK not in result.stderr, result.stderr
    verdicts: list[dict[str, Any]] = json.loads(result.stdout)
    assert result.returncode == (0 if all(verdict["passed"] for verdict in verdicts) else 1)
    assert [path.name for path in folder.iterdir()] == ["mine.py"]
    return verdicts


@pytest.mark.nightly
@pytest.mark.budget(processor_s=45)
def test_a_right_script_passes(tmp_path: Path) -> None:
    verdicts = _verify(tmp_path, "pass", "1,2")
    assert [(one["workers"], one["steps"], one["passed"]) for one in verdicts] == [(1, 2, True), (2, 2, True)]


@pytest.mark.budget(processor_s=45)
def test_the_first_difference_on_two_workers_is_named(tmp_path: Path) -> None:
    one, two = _verify(tmp_path, "scale = run.world_size", "1,2")
    assert one["passed"]
    assert (two["workers"], two["passed"], two["step"]) == (2, False, 0)
    assert "gradient" in two["tensor"] and two["cause"]


@pytest.mark.budget(processor_s=30)
def test_the_order_of_a_set_differs_between_two_runs_of_one_worker(tmp_path: Path) -> None:
    change = "scale = sum(place * int(word) for place, word in enumerate({str(n) for n in range(999)})) / 1e9"
    (verdict,) = _verify(tmp_path, change, "1")
    assert (verdict["workers"], verdict["passed"], verdict["step"]) == (1, False, 0)
    assert "differs" in verdict["cause"]
