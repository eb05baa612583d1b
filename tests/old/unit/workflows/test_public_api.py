"""The public names of `paceline`, and that every command has its function with the same options."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import typer

import paceline
from paceline.cli import command_line
from paceline.cli.options import GROUPS

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "topo": paceline.topo,
    "probe": paceline.probe,
    "plan": paceline.plan,
    "launch": paceline.launch,
    "train": paceline.train,
    "scale": paceline.scale,
    "verify": paceline.verify,
    "submit slurm": paceline.submit.slurm,
    "submit kubernetes": paceline.submit.kubernetes,
    "bench comm": paceline.bench.comm,
    "bench checkpoint": paceline.bench.checkpoint,
    "checkpoint ls": paceline.checkpoint.ls,
    "checkpoint verify": paceline.checkpoint.verify,
    "checkpoint prune": paceline.checkpoint.prune,
    "checkpoint export": paceline.checkpoint.export,
    "export": paceline.checkpoint.export,
    "watch": paceline.watch,
    "report": paceline.report,
    "doctor": paceline.doctor,
    "memory": paceline.memory,
    "new": paceline.new,
    "jobs ls": paceline.catalog.recipes,
    "jobs keys": paceline.catalog.job_keys,
    "models": paceline.catalog.models,
    "data": paceline.catalog.data_sets,
}
OTHERS = (paceline.dry_run_mesh, paceline.fit_step_times, paceline.suggest_measurements)

SHOWN = {"as_json", "_list", "show_all", "strict", "help"}
"""What a command prints, or which exit code it has; no matter for a function."""
IN_PYTHON = {
    "model",
    "callbacks",
    "say",
    "on_failure",
    "on_each",
    "arguments",
    "announce",
    *(group.__name__.lower() for group in GROUPS),
}
"""What a command line cannot give, or gives as options of its own."""
OF_OTHER_FUNCTIONS = {
    "plan": {"fit", "predict", "suggest", "budget", "max_nodes", "max_devices", "dry_run_mesh"},
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
    assert of_groups <= options
    others = OF_OTHER_FUNCTIONS.get(name, set())
    plain_strategy = {"strategy"} if "strategy" in parameters and "strategy" not in of_groups else set()
    assert options - of_groups - SHOWN - others == set(parameters) - IN_PYTHON | plain_strategy


def test_dir_shows_the_public_names_and_no_others() -> None:
    assert dir(paceline) == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = paceline.trian


def test_functions_stay_when_packages_of_their_names_are_imported() -> None:
    code = """
import sys
import paceline
assert not {"torch", "numpy", "typer", "rich"} & set(sys.modules), "loaded too much"
import paceline.checkpoint.load, paceline.launch.ssh, paceline.plan.placement
import paceline.report.study, paceline.train.loop
for name in ("launch", "plan", "report", "train"):
    assert getattr(paceline, name).__module__ == f"paceline.workflows.{name}", name
assert paceline.checkpoint.ls.__module__ == "paceline.workflows.checkpoint"
from paceline import plan, train
from paceline.train import Run
from paceline.plan import spread
assert plan is paceline.plan and train is paceline.train and Run is paceline.Run and callable(spread)
assert sys.modules["paceline.train"].Run is Run
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "function", list(dict.fromkeys([*FUNCTIONS.values(), *OTHERS])), ids=lambda one: f"{one.__module__}.{one.__name__}"
)
def test_a_public_function_says_what_it_takes_returns_and_raises(function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    examples = re.findall(r"Example: `(.*?)`\.\n", text)
    assert len(examples) == 1
    for name in _names(examples[0]):
        target: Any = paceline
        for part in name.split("."):
            target = getattr(target, part)
        assert not isinstance(target, ModuleType)
    described = text.partition("Args:")[2]
    for name in inspect.signature(function).parameters:
        assert re.search(rf"\b{name}\b", described) or not described, name
    assert "Raises:" in text
    hints = inspect.get_annotations(function)
    assert set(hints) == {*inspect.signature(function).parameters, "return"}


def _names(example: str) -> list[str]:
    """The calls of functions of `paceline` in an example."""
    calls = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Call)]
    texts = [ast.unparse(call.func) for call in calls]
    return [text.removeprefix("paceline.") for text in texts if text.startswith("paceline.")]
