"""Reference pages that follow from the program itself: job keys, commands, the Python API."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import paceline
from paceline.cli.commands import COMMANDS
from paceline.cli.options import parser_of
from paceline.workflows.arguments import field_meanings
from paceline.workflows.catalog import CatalogEntry


def write_pages(folder: Path) -> None:
    """Write every page into `folder`; a page that is the same already is left alone, so that builds stay short."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"job-keys.md": job_keys(), "commands.md": commands(), "python.md": python_api(), "files.md": files()}
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def job_keys() -> str:
    """Every key of a job file, a table for each of its tables."""
    tables: dict[str, list[CatalogEntry]] = {}
    for key in paceline.catalog("keys"):
        table, _, _ = key.name.rpartition(".")
        tables.setdefault(table, []).append(key)
    lines = [
        "# Job keys",
        "",
        "What a job file (TOML), `--set KEY=VALUE`, and `paceline.init(KEY=VALUE)` can say. `paceline list keys`",
        "prints the same list. A key without a default is left out by default.",
    ]
    for table, keys in tables.items():
        lines += ["", f"## `[{table}]`" if table else "## Top level", ""]
        lines += ["| key | default | values | meaning |", "|---|---|---|---|"]
        for key in keys:
            name = key.name.removeprefix(f"{table}.")
            lines.append(f"| `{name}` | {_code(key.default)} | {_cell(key.values)} | {_cell(key.meaning)} |")
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Every command with its arguments and options, in the order of `paceline --help`."""
    lines = ["# Commands", "", "What `paceline COMMAND --help` prints.", ""]
    for name, command in COMMANDS.items():
        lines += [f"## paceline {name}", "", "```text", parser_of(name, command).format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def python_api() -> str:
    """Every public name of `paceline`, from its docstring."""
    functions, values, groups = [], [], []
    for name in paceline.__all__:
        value = getattr(paceline, name)
        if value is paceline.errors:
            continue
        if isinstance(value, ModuleType):
            groups.append(name)
        elif inspect.isclass(value):
            values.append(name)
        elif callable(value):
            functions.append(name)
    lines = ["# Python API", "", "`import paceline` loads nothing heavy; a name is loaded when it is first used.", ""]
    lines += ["## Functions", ""]
    for name in functions:
        lines += _directive("autofunction", f"paceline.{name}")
    for name in groups:
        module = getattr(paceline, name)
        lines += [f"## paceline.{name}", "", inspect.getdoc(module) or "", ""]
        for inner, function in vars(module).items():
            if inspect.isfunction(function) and function.__module__ == module.__name__ and not inner.startswith("_"):
                lines += _directive("autofunction", f"{module.__name__}.{inner}")
    lines += ["## Values", ""]
    for name in values:
        lines += _directive("autoclass", f"paceline.{name}", "   :members:")
    lines += ["## Errors", "", *_directive("automodule", "paceline.errors", "   :members:", "   :show-inheritance:")]
    return "\n".join(lines) + "\n"


def files() -> str:
    """The files of a run folder, and the fields of those that are values of the program."""
    lines = ["# Files", "", "## A run folder", "", "| file | holds |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in _RUN_FOLDER.items()]
    lines += ["", "JSON files hold the fields below. A later release may add fields; it reads files of earlier ones."]
    for title, value in _VALUES.items():
        for table in (value, *_nested(value)):
            heading = f"## {title}" if table is value else f"### {table.__name__}"
            lines += ["", heading, "", (inspect.getdoc(table) or "").partition("\n\n")[0], ""]
            meanings = field_meanings(table)
            lines += ["| field | type | meaning |", "|---|---|---|"]
            for field in dataclasses.fields(table):
                kind = str(field.type).replace("|", "or")
                lines.append(f"| `{field.name}` | `{kind}` | {_cell(meanings[field.name])} |")
    return "\n".join(lines) + "\n"


def _nested(table: type) -> list[type]:
    """The dataclasses that the fields of a dataclass hold, but for those with a section of their own."""
    own_sections = {*_VALUES.values(), paceline.Job}
    found: list[type] = []
    for hint in get_type_hints(table).values():
        for kind in (hint, *get_args(hint)):
            if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and kind not in (own_sections | {*found}):
                found.append(kind)
    return found


_RUN_FOLDER = {
    "job.json": "what was trained ([job keys](job-keys.md))",
    "plan.json": "how it was spread over devices",
    "record.json": "what happened",
    "metrics.jsonl": "a line of JSON for each logged step and each epoch, and every 50 steps how fast they were",
    "workers.json": "while it trains: every worker's step, memory, and what it is doing",
    "model.safetensors": "the final weights",
    "checkpoints/": "see [Checkpoints](../../checkpoints.md)",
    "logs/": "what each worker printed",
    "failure.json": "after a failure: who failed, why, where, and what to try",
    "failure-1.json": "of a run that was started again: the failure before restart 1",
    "workers/": "notes of how each worker began and ended",
}
_VALUES = {"plan.json": paceline.Plan, "record.json": paceline.RunRecord, "cluster.json": paceline.Cluster}


def _directive(kind: str, target: str, *options: str) -> list[str]:
    return ["```{eval-rst}", f".. {kind}:: {target}", *options, "```", ""]


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
