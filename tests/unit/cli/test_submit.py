"""What `paceline submit` hands to schedulers, without one."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline.cli import command_line
from paceline.cli.options import parse_hours
from paceline.errors import PacelineError
from paceline.spec import Job, Plan


def submit(*arguments: str) -> str:
    result = CliRunner().invoke(command_line(), ["submit", *arguments], catch_exceptions=True)
    if isinstance(result.exception, PacelineError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("command", "inside"),
    [
        (["train", "digits-lenet", "--max-steps", "3"], ["train", "digits-lenet", "--max-steps", "3"]),
        (["launch", "my script.py", "--flag"], ["launch", "my script.py", "--flag"]),
        (["bench", "comm", "--rounds", "2"], ["bench", "comm", "--rounds", "2"]),
    ],
)
def test_a_job_script_runs_the_command_inside_the_allocation(
    command: list[str], inside: list[str], tmp_path: Path
) -> None:
    options = ["--nodes", "2", "-n", "4", "--time", "1:30", "--partition", "gpu", "--out", str(tmp_path), "--dry-run"]
    script = submit("slurm", *options, *command)
    lines = script.splitlines()
    for option in ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=0-01:30:00", "--partition=gpu"):
        assert f"#SBATCH {option}" in lines
    words = shlex.split(lines[-1].partition("exec ")[2])
    assert words[:3] == [sys.executable, "-m", "paceline"]
    at = words.index("--launcher")
    assert words[at : at + 4] == ["--launcher", "slurm", "--out", str(tmp_path)]
    assert words[3:at] + words[at + 4 :] == inside
    assert not list(tmp_path.iterdir())


def test_workers_on_cpu_ask_for_no_gpu() -> None:
    assert "gpus" not in submit("slurm", "--cpu", "--dry-run", "train", "digits-lenet")


def test_only_commands_that_run_workers_are_submitted() -> None:
    with pytest.raises(PacelineError, match="'topo' is not possible; submit train, launch, scale, bench"):
        submit("slurm", "--dry-run", "topo")


def _container(*arguments: str) -> dict[str, list[str]]:
    options = ["--image", "a/b@sha256:1", "--claim", "runs", "--out", "/data/run", "--nodes", "2", "-n", "2", "--cpu"]
    _, job = yaml.safe_load_all(submit("kubernetes", *arguments, *options))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_pods_carry_job_and_plan_with_them() -> None:
    words = _container("digits-lenet", "--set", "virtual_shards=8")["command"]
    assert words[words.index("paceline.train") + 1] == "/data/run"
    job = Job.from_mapping(json.loads(words[words.index("--job") + 1]))
    plan = Plan.from_mapping(json.loads(words[words.index("--plan") + 1]))
    assert (job.name, job.virtual_shards) == ("digits-lenet", 8)
    assert (plan.world_size, plan.device_kind, plan.nodes) == (4, "cpu", ())


def test_a_script_in_the_image_keeps_its_arguments() -> None:
    assert _container("/app/train.py", "--epochs", "3")["command"][-3:] == ["/app/train.py", "--epochs", "3"]


def test_more_workers_than_virtual_shards_are_refused_before_anything_is_submitted() -> None:
    with pytest.raises(PacelineError, match="cannot share virtual_shards"):
        submit("kubernetes", "digits-lenet", "--image", "a", "--claim", "b", "--out", "/data/x", "-n", "64")


@given(st.integers(0, 99), st.integers(0, 59))
def test_hours(hours: int, minutes: int) -> None:
    text = f"{hours}:{minutes:02}"
    if hours + minutes:
        assert parse_hours(text) == 3600 * hours + 60 * minutes
    else:
        with pytest.raises(PacelineError, match="such as 2:30"):
            parse_hours(text)


@pytest.mark.parametrize("text", ["", "2", "2:60", "x:1", "1:2:3", "-1:00"])
def test_no_hours(text: str) -> None:
    with pytest.raises(PacelineError, match="such as 2:30"):
        parse_hours(text)
