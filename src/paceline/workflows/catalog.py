"""What a job can say and what the package brings along: keys, recipes, models, data sets."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import JobError
from paceline.spec import Job, Plan
from paceline.spec.codec import Bounds
from paceline.workflows.jobs import RECIPES, load_job
from paceline.workflows.strategy import PLAN_KEYS
from paceline.workflows.where import Where

_KIND_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "text",
}


@dataclass(frozen=True)
class CatalogEntry:
    """A recipe, model or data set, or a key of a job file."""

    name: str
    """Of a key with its table, such as "optim.lr"."""
    meaning: str
    values: str = ""
    """What a key can be."""
    default: str = ""
    """The default value of a key in TOML; empty for one that is left out by default."""


def job_keys(prefix: str = "") -> list[CatalogEntry]:
    """The keys of a job file, tables last, and then those of `--set` alone: how a run is spread, and where it runs.

    Example: `paceline.catalog.job_keys("optim.")`.

    Args:
        prefix: what the names begin with; all keys by default.

    Raises:
        JobError: no key begins with `prefix`.
    """
    found = sorted(_keys_of(Job, ""), key=lambda key: "." in key.name)  # a TOML file has its tables last too
    found += [key for key in _keys_of(Plan, "plan.") if key.name.split(".")[1] in PLAN_KEYS]
    found = [key for key in (*found, *_keys_of(Where, "where.")) if key.name.startswith(prefix)]
    if not found:
        raise JobError(f"No key of a job begins with '{prefix}'; leave it out to see all keys.")
    return found


def recipes() -> list[CatalogEntry]:
    """The jobs that come with the package; `paceline.train` takes their names.

    Example: `paceline.catalog.recipes()`.

    Raises:
        JobError: never on a complete installation.
    """
    jobs = {name: load_job(file) for name, file in RECIPES.items()}
    meaning = "{0.model.name} on {0.data.name}, epochs = {0.epochs}, global_batch_size = {0.global_batch_size}"
    return [CatalogEntry(name, meaning.format(job)) for name, job in jobs.items()]


def models() -> list[CatalogEntry]:
    """The reference models, which `model = "NAME"` in a job names, and their options.

    Example: `paceline.catalog.models()`.

    Raises:
        JobError: never on a complete installation.
    """
    from paceline.models import MODELS  # loads torch

    entries = []
    for name, build in MODELS.items():
        options = [
            one.name if one.default is one.empty else f"{one.name} = {json.dumps(one.default)}"
            for one in inspect.signature(build).parameters.values()
        ]
        entries.append(CatalogEntry(name, f"{_first_sentence(build)} Options: {', '.join(options)}."))
    return entries


def data_sets() -> list[CatalogEntry]:
    """The data sets that `data = "NAME"` in a job names.

    Example: `paceline.catalog.data_sets()`.

    Raises:
        JobError: never on a complete installation.
    """
    from paceline.data import SOURCES  # loads torch

    return [CatalogEntry(name, _first_sentence(load)) for name, load in SOURCES.items()]


def _keys_of(table: type, prefix: str, *, is_left_out: bool = False) -> Iterator[CatalogEntry]:
    """The keys of a table; `is_left_out`: the whole table is, by default, and so its keys have no default either."""
    kinds, meanings = get_type_hints(table, include_extras=True), field_meanings(table)
    for field in dataclasses.fields(table):
        kind, name = kinds[field.name], f"{prefix}{field.name}"
        nested = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and dataclasses.is_dataclass(one)]
        if nested and get_origin(kind) is not tuple:
            yield from _keys_of(nested[0], f"{name}.", is_left_out=is_left_out or field.default is None)
            continue
        default = None if field.default is dataclasses.MISSING else field.default
        default = default if field.default_factory is dataclasses.MISSING else field.default_factory()
        values = ", ".join([_values(kind), *_bounds(kind)])
        shown = "" if default is None or is_left_out else json.dumps(default)
        yield CatalogEntry(name, meanings[field.name], values, shown)


def field_meanings(table: type) -> dict[str, str]:
    """The string below each attribute of a class, which Python itself does not keep."""
    (body,) = ast.parse(inspect.getsource(table)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for attribute, below in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if not isinstance(attribute, ast.AnnAssign) or not isinstance(attribute.target, ast.Name):
            continue
        text = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = inspect.cleandoc(str(below.value.value)).replace("\n", " ")
        found[attribute.target.id] = text
    return found


def _values(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _values(arguments[0])
    if origin is Literal:
        return " | ".join(json.dumps(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_values(one) for one in arguments if one is not type(None)))
    if origin is tuple:
        return f"list of: {_values(arguments[0])}"
    return "table" if origin is dict or dataclasses.is_dataclass(kind) else _KIND_WORDS[kind]


def _bounds(kind: Any) -> list[str]:
    """The bounds of the numbers in a type, in words, but for those that nobody meets."""
    if isinstance(kind, Bounds):
        words = {"low": "at least {}", "above": "above {}", "high": "at most {}", "below": "below {}"}
        limits = {text: getattr(kind, name) for name, text in words.items()}
        return [text.format(limit) for text, limit in limits.items() if abs(limit) < 2**20]
    return next(filter(None, map(_bounds, get_args(kind))), [])


def _first_sentence(build: Callable[..., Any]) -> str:
    build = getattr(build, "func", build)  # of a partial
    return (inspect.getdoc(build) or "").partition("\n\n")[0].replace("\n", " ")
