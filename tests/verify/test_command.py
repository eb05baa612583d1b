"""`paceline verify SCRIPT` trains it on each number of workers, in new processes; it says what differs first, and why,
and ends with 0, 1 or 2."""

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
values = dict(global_batch_size=8, virtual_shards=4, precision="float64")
with paceline.init(**values, progress=False, checkpoint_dir="kept") as run:
    {change}
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    print("what a script prints is no verdict")
    for batch in run.batches(samples):
        {each_step}
        run.step(batch, lambda model, shard: torch.nn.functional.cross_entropy(model(shard[0]), shard[1]) * scale)
torch.save(model.state_dict(), "written_after_the_last_step.pt")
"""


def _verify(
    folder: Path, change: str, workers: str, exit_code: int, *options: str, each_step: str = "pass"
) -> dict[str, Any]:
    (folder / "mine.py").write_text(SCRIPT.format(change=change, each_step=each_step))
    result = paceline("verify", "mine.py", "-n", workers, "--steps", "2", "--json", *options, cwd=folder)
    assert result.stdout and TRACEBACK not in result.stderr, result.stderr
    assert result.returncode == exit_code, result.stdout
    assert [path.name for path in folder.iterdir()] == ["mine.py"]
    return dict(json.loads(result.stdout))


@pytest.mark.budget(processor_s=60)
def test_workers_that_compute_unequal_numbers_of_shards_are_compared_with_equal_ones(tmp_path: Path) -> None:
    rate = 'optimizer.param_groups[0]["lr"] = 0.1 * len(batch)'
    verdict = _verify(tmp_path, "pass", "2", 1, "--deal", each_step=rate)
    assert (verdict["workers"], verdict["first_difference"], verdict["step"]) == (2, "learning_rate", 1)
    assert verdict["ranks"] == [1] and "0.1 instead of 0.3" in verdict["cause"]


@pytest.mark.nightly
@pytest.mark.budget(processor_s=45)
def test_the_order_of_a_set_differs_between_two_runs_of_one_worker(tmp_path: Path) -> None:
    change = "scale = sum(place * int(word) for place, word in enumerate({str(n) for n in range(999)})) / 1e9"
    verdict = _verify(tmp_path, change, "1", 2)
    assert (verdict["workers"], verdict["outcome"]) == (1, "could not tell")
    assert "the same run twice differs" in verdict["cause"]


@pytest.mark.budget(processor_s=30)
def test_a_run_that_is_refused_says_why_in_the_report(tmp_path: Path) -> None:
    verdict = _verify(tmp_path, "run.step(None, None)", "1,2", 2)
    assert verdict["outcome"] == "could not tell" and "run.prepare" in verdict["cause"]


@pytest.mark.budget(processor_s=30)
def test_the_traceback_of_a_script_that_raises_begins_in_the_script(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\n\ndef learn():\n    raise ValueError('my own')\n\nlearn()\n")
    result = paceline("verify", "mine.py", "-n", "1", cwd=tmp_path)
    assert result.returncode == 2 and "my own" in result.stdout
    assert result.stderr.partition(TRACEBACK)[2].split("\n")[1].endswith('mine.py", line 6, in <module>'), result.stderr


@pytest.mark.budget(processor_s=60)
@pytest.mark.parametrize(
    ("script", "difference", "words"),
    [
        ("loop_accumulation_not_divided", "loss", "added up and not divided"),
        pytest.param("right_accumulation", "none", "", marks=pytest.mark.nightly),
    ],
)
def test_a_script_that_knows_nothing_of_paceline(script: str, difference: str, words: str, tmp_path: Path) -> None:
    path = str(Path(__file__).parent / "corpus" / f"{script}.py")
    options = ["--batch", "{batch}", "--accumulate", "{accumulate}"]
    result = paceline("verify", "--batch", "8", "-n", "2", "--json", path, "--", *options, cwd=tmp_path)
    assert result.returncode == (difference != "none"), result.stdout + result.stderr
    verdict = json.loads(result.stdout)
    assert verdict["first_difference"] == difference and words in verdict["cause"], verdict
    assert verdict["step"] == (None if difference == "none" else 1) and verdict["steps"] == 4
