"""Every command is a function of `paceline` with the same options, and help loads nothing heavy."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import typer

import paceline
from paceline.cli import COMMANDS, command_line
from paceline.cli.options import GROUPS, keys_of
from paceline.spec import Job
from paceline.workflows import catalog

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(paceline, name)
        for name in (*("topo", "probe", "plan", "launch", "train", "scale", "verify", "watch", "report", "doctor"),)
    },
    **{f"submit {name}": getattr(paceline.submit, name) for name in ("slurm", "kubernetes")},
    **{f"checkpoint {name}": getattr(paceline.checkpoint, name) for name in ("ls", "verify", "prune", "export")},
    "list recipes": paceline.catalog.recipes,
    "list models": paceline.catalog.models,
    "list data": paceline.catalog.data_sets,
    "list keys": paceline.catalog.job_keys,
}
SHOWN = {"as_json", "_list", "show_all", "strict", "help"}
"""What a command prints, or which exit code it has; no matter for a function."""
IN_PYTHON = {
    *("model", "callbacks", "say", "on_each", "arguments", "quiet"),
    *(group.__name__.lower() for group in GROUPS),
}
"""What a command line cannot give, or gives as options of its own."""
OF_OTHER_FUNCTIONS = {
    "plan": {"fit", "predict", "dry_run_mesh"},
    "train": {"dry_run"},
    "launch": {"dry_run"},
}


def commands() -> dict[str, Any]:
    """Every command that is not hidden, by its words."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(command_line()).commands.items():  # type: ignore[attr-defined]
        below = getattr(command, "commands", None)
        if below is not None:
            found |= {f"{name} {inner}": one for inner, one in below.items()}
        elif not command.hidden:
            found[name] = command
    return found


def test_every_command_has_its_function() -> None:
    assert set(commands()) == set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_command_and_its_function_take_the_same(name: str) -> None:
    options = {parameter.name for parameter in commands()[name].params if not getattr(parameter, "hidden", False)}
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    of_groups = {
        field
        for group in GROUPS
        if group.__name__.lower() in parameters and group.__name__ in str(parameters[group.__name__.lower()].annotation)
        for field in inspect.signature(group).parameters
    }
    options |= {key.partition(".")[2] for key in keys_of(FUNCTIONS[name])}  # which --set takes
    assert of_groups <= options
    others = OF_OTHER_FUNCTIONS.get(name, set())
    plain_strategy = {"strategy"} if "strategy" in parameters and "strategy" not in of_groups else set()
    assert options - of_groups - SHOWN - others == set(parameters) - IN_PYTHON | plain_strategy


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.split()[0] not in ("submit", "list")])
def test_a_command_has_at_most_15_options(name: str) -> None:
    parameters = commands()[name].params
    assert len([one for one in parameters if one.param_type_name == "option" and not one.hidden]) <= 15


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
assert not {"torch", "numpy", "typer", "rich"} & set(sys.modules), "loaded too much"
import paceline.checkpoint.load, paceline.launch.slurm, paceline.plan.placement
import paceline.report.study, paceline.train.loop
for name in ("launch", "plan", "report", "train"):
    assert getattr(paceline, name).__module__ == f"paceline.workflows.{name}", name
assert dir(paceline) == sorted(paceline.__all__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_help_and_mistakes_load_nothing_heavy() -> None:
    code = """
import contextlib, io, json, sys
from paceline.cli import main

for sys.argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
heavy = {"torch", "numpy", "scipy", "plotly", "jinja2", "pyarrow", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""
    asked = [["paceline", "--help"], *(["paceline", name, "--help"] for name in COMMANDS), ["paceline", "train", "nix"]]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(asked)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_listed_keys_and_defaults_make_the_default_job() -> None:
    tables: dict[str, Any] = {}
    for key in catalog.job_keys():
        assert key.meaning and key.values, key.name
        if key.default:
            *above, name = key.name.split(".")
            table = tables
            for one in above:
                table = table.setdefault(one, {})
            table[name] = tomllib.loads(f"value = {key.default}")["value"]
    assert Job.from_mapping(tables) == Job()
