"""Every command is a function of `paceline` with the same options, and help loads nothing heavy."""

from __future__ import annotations

import inspect
import io
import json
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import paceline
from paceline.cli import commands
from paceline.cli.commands import COMMANDS
from paceline.cli.options import IN_PYTHON, parse, parser_of
from paceline.spec import Job
from paceline.workflows.checkpoint import CheckpointState
from tests.kit.commands import python

FUNCTIONS: dict[str, Callable[..., Any]] = {name: command.function for name, command in COMMANDS.items()}


def test_every_function_of_the_package_has_its_command() -> None:
    public = {name for name in paceline.__all__ if inspect.isfunction(getattr(paceline, name))}
    for group in (paceline.checkpoint, paceline.submit):
        own = [one for one in vars(group).values() if inspect.isfunction(one) and one.__module__ == group.__name__]
        names = {f"{group.__name__.rpartition('.')[2]}.{one.__name__}" for one in own if one.__name__[0] != "_"}
        public |= names
    assert {command.function_name for command in COMMANDS.values()} == public - {"init", "dry_run_mesh"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_command_and_its_function_take_the_same(name: str) -> None:
    parameters = set(inspect.signature(FUNCTIONS[name]).parameters)
    fields = set(inspect.signature(paceline.Where).parameters) if "where" in parameters else set()
    if "settings" in parameters:  # takes the others
        fields &= {"hosts", "launcher"}
    given = {one.dest for one in parser_of(name, COMMANDS[name])._actions} - {"help", "arguments"}
    assert given == parameters - IN_PYTHON | fields | set(COMMANDS[name].own)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.split()[0] not in ("submit", "list")])
def test_a_command_has_at_most_15_options(name: str) -> None:
    assert parser_of(name, COMMANDS[name]).format_usage().count("[-") - 1 <= 15


def test_what_a_command_line_gives_reaches_the_function() -> None:
    settings = ("optim.lr=1", "plan.recompute=true", "where.interface=eth1")
    words = ["job.toml", "-n", "2", "--strategy", "pp", "--hosts", "a:2"]
    given = parse("train", COMMANDS["train"], [*words, *(f"--set={one}" for one in settings)])
    assert (given["job"], given["workers"], given["strategy"]) == ("job.toml", 2, "pp")
    assert given["settings"] == ["optim.lr=1", "plan.recompute=true"] and given["quiet"] is False
    assert given["where"] == paceline.Where(hosts="a:2", interface="eth1")


@pytest.mark.parametrize(
    ("name", "line", "script", "arguments"),
    [
        ("launch", "-n 2 train.py -n 3 --out x", "train.py", ["-n", "3", "--out", "x"]),
        ("launch", "--torchrun=--rdzv-conf=a=1 --torchrun=--standalone -m package.module", "package.module", []),
        ("verify", "train.py --rate 1 -n 2", "train.py", ["--rate", "1"]),
        ("verify", "-n 2 train.py -- -n 3", "train.py", ["-n", "3"]),
    ],
)
def test_words_for_a_script_go_on_to_it(name: str, line: str, script: str, arguments: list[str]) -> None:
    given = parse(name, COMMANDS[name], line.split())
    assert (given.get("script", given.get("job")), given["arguments"]) == (script, arguments)
    assert given.get("torchrun", []) == (["--rdzv-conf=a=1", "--standalone"] if "--rdzv-conf" in line else [])


def test_a_list_in_a_narrow_terminal_gives_sentences_its_whole_width(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, no_color=True, width=60, highlight=False, markup=False)
    monkeypatch.setattr(commands, "console_of", lambda *_: terminal)
    commands.list_catalog(what="keys", prefix="optim.decay_")
    assert len([line for line in shown.getvalue().splitlines() if line.startswith("    ")]) <= 3


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_and_raises(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    assert len(re.findall(r"Example: `.*?paceline\..*?`\.\n", text)) == 1 and "Raises:" in text
    described = text.partition("Args:")[2]
    assert not described or all(
        re.search(rf"\b{one}\b", described) for one in inspect.signature(FUNCTIONS[name]).parameters
    )


def test_functions_stay_when_packages_of_their_names_are_imported() -> None:
    code = """
import sys
import paceline
assert not {"torch", "numpy", "rich"} & set(sys.modules), "loaded too much"
import paceline.checkpoint.load, paceline.launch.slurm, paceline.plan.placement
import paceline.report.study, paceline.train.loop
for name in ("launch", "plan", "report", "train"):
    assert getattr(paceline, name).__module__.startswith("paceline.workflows."), name
assert dir(paceline) == sorted(paceline.__all__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_help_and_mistakes_load_nothing_heavy() -> None:
    code = """
import contextlib, io, json, sys
from paceline.cli.commands import main

for sys.argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
heavy = {"torch", "numpy", "scipy", "plotly", "jinja2", "pyarrow", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""
    asked = [
        ["paceline", "--help"],
        *(["paceline", *name.split(), "--help"] for name in COMMANDS),
        ["paceline", "train", "nix"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(asked)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("target", "exit_code", "said"),
    [
        ("> /dev/full", 1, "paceline: No space left on device; make room, and start again.\n"),
        ("--nix 2> /dev/full", 2, ""),
        (">&-", 0, ""),
        ("> /dev/null", 0, ""),  # which takes the table's lines in an encoding that lacks them
    ],
)
def test_output_that_cannot_be_written_is_no_traceback(target: str, exit_code: int, said: str) -> None:
    line = f"PYTHONIOENCODING=latin-1 exec {sys.executable} -m paceline list recipes {target}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (exit_code, said)


def test_what_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    for line in ("train digits-lenet --strategy nix", "launch --strategy nix mine.py"):
        words = [sys.executable, "-m", "paceline", *line.split()]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2 and "'nix'" in done.stderr
        assert [*(tmp_path / "runs").iterdir()] == []


def test_the_listed_keys_and_defaults_make_the_default_job() -> None:
    tables: dict[str, Any] = {}
    for key in paceline.catalog("keys"):
        if key.name.startswith(("plan.", "where.")):
            continue  # of `--set` alone
        assert key.meaning and key.values, key.name
        if key.default:
            *above, name = key.name.split(".")
            table = tables
            for one in above:
                table = table.setdefault(one, {})
            table[name] = tomllib.loads(f"value = {key.default}")["value"]
    assert Job.from_mapping(tables) == Job()


def test_metrics_that_are_not_finite_are_null_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = CheckpointState("step-00000001", "complete", metrics={"loss": float("nan")})
    monkeypatch.setattr("paceline.checkpoint.ls", lambda **_: (state,))
    COMMANDS["checkpoint ls"].run(as_json=True, place="a-run")
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["checkpoints"]
    assert found["metrics"] == {"loss": None}


def test_an_interrupt_while_modules_are_loaded_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    end = python("-m", "paceline", "list", "models", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (end.returncode, end.stderr) == (-signal.SIGINT, "")
