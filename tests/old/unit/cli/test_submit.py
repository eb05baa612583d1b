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
from paceline.errors import LaunchError, PacelineError
from paceline.spec import Job, Plan
from paceline.workflows import submit as workflow
from tests.old.unit.cli.conftest import Run


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
        (["launch", "my script.py", "--out", "x"], ["launch", "my script.py", "--out", "x"]),
        (["bench", "comm", "--rounds", "2"], ["bench", "comm", "--rounds", "2"]),
    ],
)
def test_a_job_script_runs_the_command_inside_the_allocation(
    command: list[str], inside: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my script.py").write_text("")
    tmp_path = tmp_path / "out"
    options = ["--nodes", "2", "-n", "4", "--time", "1:30", "--partition", "gpu", "--out", str(tmp_path), "--dry-run"]
    script = submit("slurm", *options, *command)
    lines = script.splitlines()
    for option in ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=90", "--partition=gpu"):
        assert f"#SBATCH {option}" in lines
    words = shlex.split(lines[lines.index("run=$!") - 1].removesuffix("&"))
    assert words[:3] == [sys.executable, "-m", "paceline"]
    at = words.index("--launcher")
    assert words[at : at + 4] == ["--launcher", "slurm", "--out", str(tmp_path)]
    assert words[3:at] + words[at + 4 :] == inside
    assert not tmp_path.exists()


def test_workers_on_cpu_ask_for_no_gpu() -> None:
    assert "gpus" not in submit("slurm", "--cpu", "--dry-run", "train", "digits-lenet")


def test_only_commands_that_run_workers_are_submitted() -> None:
    with pytest.raises(PacelineError, match="'topo' is not possible; submit train, launch, scale, bench"):
        submit("slurm", "--dry-run", "topo")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("train nix", "'nix' is neither a job file nor a recipe"),
        ("train", "Missing argument 'JOB'; see `paceline train --help`"),
        ("train digits-lenet --nixopt 3", "No such option: --nixopt"),
        ("train digits-lenet --set model=nix", "nix"),
        ("scale digits-lenet --set modl=lenet", "There is no key 'modl'"),
        ("launch nix.py", "There is no script 'nix.py'"),
        ("bench comm --rounds many", "Invalid value for '--rounds'"),
        ("train digits-lenet --hosts a:2", "--hosts behind train has no place here"),
        ("train digits-lenet --launcher ssh", "--launcher behind train should be slurm"),
        ("train digits-lenet --out x", "write paceline submit slurm --out DIR train"),
        ("train digits-lenet --dry-run", "write paceline submit slurm --dry-run train"),
        ("launch --dry-run nix.py", "write paceline submit slurm --dry-run launch"),
    ],
)
def test_a_mistake_behind_the_command_is_told_before_anything_is_submitted(
    command: str, sentence: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workflow, "submit_script", lambda _script: pytest.fail("it was submitted"))
    for options in ((), ("--dry-run",)):
        code, out, err = run("submit", "slurm", *options, *command.split())
        assert (code, out) == (2, "") and err.startswith("paceline: ") and sentence in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_slurm_refuses_leaves_nothing_behind(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_script: str) -> str:
        raise LaunchError("sbatch refused: no such partition")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workflow, "submit_script", refuse)
    (tmp_path / "mine").mkdir()
    for options in ((), ("--out", "new"), ("--out", "mine")):
        code, _, err = run("submit", "slurm", *options, "train", "digits-lenet")
        assert (code, err) == (2, "paceline: sbatch refused: no such partition\n")
    assert not [path for path in tmp_path.rglob("*") if path.name not in ("mine", "runs")]
    monkeypatch.setattr(workflow, "submit_script", lambda _script: "42")
    code, out, _ = run("submit", "slurm", "--out", "mine", "train", "digits-lenet")
    assert code == 0 and out.startswith("Slurm job 42;") and (tmp_path / "mine" / "submit.sh").exists()


def test_a_folder_that_cannot_be_made_is_one_sentence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow, "submit_script", lambda _script: pytest.fail("it was submitted"))
    (tmp_path / "m.csv").write_text("")
    for out in (tmp_path / "m.csv", "/proc/x"):
        code, _, err = run("submit", "slurm", "--out", out, "train", "digits-lenet")
        assert code == 2 and f"The run folder {out} cannot be used" in err and err.count("\n") == 1


def test_more_workers_than_there_can_be_are_refused() -> None:
    with pytest.raises(PacelineError, match="are more than"):
        submit("slurm", "--dry-run", "--nodes", "99999", "-n", "99999", "train", "digits-lenet")


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
