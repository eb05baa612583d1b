"""`paceline verify SCRIPT` trains a script on one worker, on one again and on two, each in new processes; says what
differs first, and why; and ends with 1 if anything does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import TRACEBACK, paceline

SCRIPT = """\
import os
import torch
import paceline

draw = torch.Generator().manual_seed(0)
samples = [(torch.randn(4, generator=draw), number % 3) for number in range(16)]
weights = torch.ones(3)
{before}
with paceline.init(global_batch_size=8, virtual_shards=2, epochs=1, progress=False) as run:
    model = torch.nn.Linear(4, 3)
    model.register_buffer("level", torch.zeros(1))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.batches(samples):
        run.step(batch, lambda model, shard: torch.nn.functional.cross_entropy(model(shard[0]), shard[1], weights))
        {after}
"""
WORDS = "{'red', 'orange', 'yellow', 'green', 'blue', 'indigo', 'violet', 'black', 'white', 'grey'}"


def _verify(folder: Path, before: str = "", after: str = "pass") -> list[dict[str, Any]]:
    """The verdicts on one worker and on two."""
    (folder / "mine.py").write_text(SCRIPT.format(before=before, after=after))
    result = paceline("verify", "mine.py", "--workers", "1,2", "--steps", "2", "--json", cwd=folder)
    assert result.stdout and TRACEBACK not in result.stderr, result.stderr
    verdicts: list[dict[str, Any]] = json.loads(result.stdout)
    assert result.returncode == (0 if all(verdict["passed"] for verdict in verdicts) else 1)
    return verdicts


def test_a_right_script_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    verdicts = _verify(tmp_path)
    assert [(one["workers"], one["steps"], one["passed"]) for one in verdicts] == [(1, 2, True), (2, 2, True)]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_weights_in_the_order_of_a_set_differ_between_two_runs_of_one_worker(tmp_path: Path) -> None:
    before = f"for place, word in enumerate({WORDS}): weights[place % 3] += place * len(word)"
    (verdict,) = _verify(tmp_path, before)
    assert (verdict["workers"], verdict["passed"], verdict["step"]) == (1, False, 0)
    assert "differ" in verdict["cause"]


@pytest.mark.nightly
def test_a_buffer_set_by_rank_is_named_with_the_rank(tmp_path: Path) -> None:
    one, two = _verify(tmp_path, after="model.level += int(os.environ['RANK'])")
    assert one["passed"] and not two["passed"]
    assert "level" in two["tensor"] and "rank 1" in two["cause"]
