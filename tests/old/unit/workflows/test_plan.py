"""Plans from a file, and files that hold none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import command_line
from paceline.errors import JobError
from paceline.spec import Plan


def test_a_plan_comes_back(tmp_path: Path) -> None:
    plan = Plan(world_size=3, algorithm="ring")
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_mapping()))
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("text", ["", "[]", "{", '{"worlds": 2}', '{"world_size": 0}'])
def test_what_is_no_plan_is_one_sentence_with_the_name_of_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(JobError, match=r"plan\.json cannot be read as a plan") as caught:
        Plan.load(tmp_path / "plan.json")
    assert "\n" not in str(caught.value)


def test_training_takes_its_workers_from_the_plan_and_options_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DEVICE", "cpu")
    (tmp_path / "plan.json").write_text(json.dumps(Plan(world_size=3).to_mapping()))
    words = ["train", "digits-lenet", "--dry-run", "--plan", str(tmp_path / "plan.json")]
    planned = CliRunner().invoke(command_line(), words, catch_exceptions=False).stdout
    assert planned.startswith("# 3 workers,") and "--nproc-per-node 3" in planned
    assert (
        CliRunner()
        .invoke(command_line(), [*words, "-n", "2"], catch_exceptions=False)
        .stdout.startswith("# 2 workers,")
    )
