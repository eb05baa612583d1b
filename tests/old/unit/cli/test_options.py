"""What a command line means, before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from paceline.cli import command_line
from paceline.cli.options import options_of, parse_size, parse_tolerance
from paceline.errors import JobError, LaunchError, PacelineError
from paceline.plan import place
from paceline.spec import Cluster, Device, Job, Node, load_job
from paceline.workflows.jobs import recipe_names, resolve_job
from paceline.workflows.where import Where


def test_the_recipe_of_the_demo_is_there() -> None:
    assert "digits-lenet" in recipe_names()


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_a_job_of_its_name_that_can_be_placed(name: str) -> None:
    job = resolve_job(name, None, None)
    assert job.name == name
    machine = Cluster((Node("here", 4, 2**34, "a processor", tuple(Device("cpu", i, "", 2**32) for i in range(4))),))
    assert place(job, machine, 4).world_size == 4


def test_a_file_is_a_job_of_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('global_batch_size = 32\nmodel = "mlp"\n')
    assert resolve_job(str(path), None, None) == load_job(path)
    assert resolve_job(str(path), None, None).name == "mine"


def test_a_recipe_wins_over_a_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits-lenet").mkdir()
    assert resolve_job("digits-lenet", None, None).data.name == "digits"


def test_settings_and_data_change_the_job_and_nothing_else() -> None:
    plain = resolve_job("digits-lenet", None, None)
    changed = resolve_job("digits-lenet", ["optim.lr=0.5", "epochs=2", "model=mlp"], None)
    assert changed == plain.with_values(optim={"lr": 0.5}, epochs=2, model="mlp")
    assert changed.optim.momentum == plain.optim.momentum


def test_the_data_directory_survives_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_job("mnist-lenet", None, "sets").data.dir == str(tmp_path / "sets")
    # --data wins over --set.
    assert resolve_job("mnist-lenet", ["data.dir=elsewhere"], "sets").data.dir == str(tmp_path / "sets")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("optim.clip_norm=none", Job().with_values(optim={"clip_norm": None})),
        ("parity=bitwise", Job().with_values(parity="bitwise")),
        ('parity = "bitwise"', Job().with_values(parity="bitwise")),
        ("optim.betas=[0.8, 0.9]", Job().with_values(optim={"betas": [0.8, 0.9]})),
        ("optim.lr=1", Job().with_values(optim={"lr": 1.0})),
        ("data.options.file=a=b.txt", Job().with_values(data={"options": {"file": "a=b.txt"}})),
    ],
)
def test_values_are_toml_and_words(value: str, expected: Job, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('name = "job"')
    assert resolve_job(str(path), [value], None) == expected


@pytest.mark.parametrize(
    ("job", "settings", "words"),
    [
        ("digits-lenett", [], "did you mean 'digits-lenet'.*recipes are"),
        ("zzz", [], "neither a job file nor a recipe; the recipes are"),
        ("missing.toml", [], "no job file 'missing.toml'"),
        (".", [], "is a directory"),
        ("digits-lenet", ["optim.lr"], "write key=value"),
        ("digits-lenet", ["=1"], "write key=value"),
        ("digits-lenet", ["optim.lrr=1"], "'optim.lrr': did you mean 'lr'"),
        ("digits-lenet", ["epochs=many"], "epochs = 'many' should be a whole number"),
        ("digits-lenet", ["epochs=0"], "epochs = 0 should be at least 1"),
        ("digits-lenet", ["optim.lr=nan"], "finite"),
        ("digits-lenet", ["optim=3"], "should be a table"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    job: str, settings: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=words) as caught:
        resolve_job(job, settings, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.01", 0.01), ("0", 0.0), ("2.5%", 0.025), ("100%", 1.0)])
def test_tolerance(text: str, value: float) -> None:
    assert parse_tolerance(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "%", "-1%", "101%", "2", "nan", "a little", "1%%"])
def test_other_tolerances_are_refused(text: str) -> None:
    with pytest.raises(JobError, match="--tolerance"):
        parse_tolerance(text)


def test_every_field_of_a_group_is_an_option_of_its_own_type() -> None:
    words = ["train", "digits-lenet", "--set", "parity=numeric", "-n", "2", "--dry-run", "--hang-timeout", "30"]
    words += ["--strategy", "fsdp", "--cpu-offload", "--max-restarts", "1", "--launcher", "local"]
    shown = CliRunner().invoke(command_line(), words, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("# 2 workers, launcher local")
    wrong = CliRunner().invoke(command_line(), ["train", "digits-lenet", "--dry-run", "--max-restarts", "-1"])
    assert wrong.exit_code == 2 and "than or equal to" in wrong.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "digits-lenet", "--dry-run", "--hang-timeout", "inf"], "--hang-timeout inf should be a number of"),
        (["launch", "--hosts", "a:1", "--hosts-file", "b", "train.py"], "--hosts 'a:1' and --hosts-file 'b' both"),
        (["plan", "digits-lenet", "--price", "much"], "--price 'much' should be an amount"),
        (["train", "digits-lenet", "--set", "data=3", "--dry-run"], "data = 3 should be a table"),
    ],
)
def test_a_message_names_the_option_and_in_python_the_parameter(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    refused = CliRunner().invoke(command_line(), words)
    assert isinstance(refused.exception, PacelineError) and str(refused.exception).startswith(says)
    with pytest.raises(LaunchError, match=r"hang_timeout_s = inf should be"):
        Where(hang_timeout_s=float("inf"))


@pytest.mark.parametrize("command", [["memory"], ["bench", "comm"], ["submit", "kubernetes"]])
def test_the_help_of_a_size_shows_one(command: list[str]) -> None:
    sizes = [one for one in described(command) if one.metavar == "SIZE"]
    assert sizes
    for size in sizes:
        assert parse_size(re.findall(r"also as (\w+)", size.help)[0], "--size") >= 4096


def test_the_order_of_a_union_does_not_matter() -> None:
    def workflow(*, one: Path | str, two: str | Path, three: float | str, four: str | float) -> None:
        """Args:
        one, two, three, four: something.
        """

    @options_of(workflow)
    def command(**options: Any) -> None: ...

    assert list(command.__annotations__.values()) == [Path, Path, str, str]


def described(words: list[str]) -> list[Any]:
    command: Any = get_command(command_line())
    for word in words:
        command = command.commands[word]
    return list(command.params)


@pytest.mark.parametrize(
    ("words", "option", "example"),
    [
        ("bench comm", "algorithms", "all_reduce,ring"),
        ("bench comm", "wires", "float32,bfloat16"),
        ("plan", "devices", "1,2,4"),
        ("scale", "devices", "1,2,4"),
        ("verify", "workers", "1,2,4"),
    ],
)
def test_the_help_of_an_option_that_takes_a_list_has_an_example(words: str, option: str, example: str) -> None:
    command: Any = get_command(command_line())
    for word in words.split():
        command = command.commands[word]
    (found,) = (one for one in command.params if one.name == option)
    assert f"such as {example}" in found.help or f"or {example}" in found.help
