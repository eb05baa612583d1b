"""`paceline.catalog`: the recipes, models and data sets that a job can name, and the keys that it can say."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.errors import JobError
from paceline.spec import Job, Plan
from paceline.spec.codec import in_words
from paceline.workflows.arguments import checked, field_meanings
from paceline.workflows.jobs import PLAN_KEYS, RECIPES, load_job
from paceline.workflows.where import Where


@dataclass(frozen=True)
class CatalogEntry:
    """A recipe, model or data set, or a key of a job file."""

    name: str
    """A key is named with its table, such as "optim.lr"."""
    meaning: str
    values: str = ""
    """What a key can be."""
    default: str = ""
    """The default value of a key in TOML; empty for one that is left out by default."""


@checked
def catalog(what: Literal["recipes", "models", "data", "keys"], prefix: str = "") -> list[CatalogEntry]:
    """The recipes, models or data sets that a job can name, or the keys that it can say.

    Keys are those of a job file, tables last, and then those of `--set` alone: how a run is spread, and where it runs.
    Example: `paceline.catalog("keys", "optim.")`.

    Args:
        what: what to list.
        prefix: what the names begin with; all by default.

    Raises:
        JobError: no name begins with `prefix`.
    """
    listed = {"recipes": _recipes, "models": _models, "data": _data_sets, "keys": _keys}[what]()
    found = [entry for entry in listed if entry.name.startswith(prefix)]
    if not found:
        raise JobError(f"No name of these {what} begins with '{prefix}'; leave it out to see all.")
    return found


def _recipes() -> Iterator[CatalogEntry]:
    for name, job in ((name, load_job(name)) for name in RECIPES):
        size = f"epochs = {job.epochs}, global_batch_size = {job.global_batch_size}"
        yield CatalogEntry(name, f"{job.model.name} on {job.data.name}, {size}")


def _models() -> Iterator[CatalogEntry]:
    from paceline.models import MODELS  # loads torch

    for name, build in MODELS.items():
        options = [
            one.name if one.default is one.empty else f"{one.name} = {json.dumps(one.default)}"
            for one in inspect.signature(build).parameters.values()
        ]
        yield CatalogEntry(name, f"{_first_sentence(build)} Options: {', '.join(options)}.")


def _data_sets() -> Iterator[CatalogEntry]:
    from paceline.data import SOURCES  # loads torch

    for name, load in SOURCES.items():
        yield CatalogEntry(name, _first_sentence(load))


def _first_sentence(build: Callable[..., Any]) -> str:
    build = getattr(build, "func", build)  # of a partial
    return (inspect.getdoc(build) or "").partition("\n\n")[0].replace("\n", " ")


def _keys() -> Iterator[CatalogEntry]:
    yield from sorted(_keys_of(Job, ""), key=lambda key: "." in key.name)  # a TOML file has its tables last too
    yield from (key for key in _keys_of(Plan, "plan.") if key.name.split(".")[1] in PLAN_KEYS)
    yield from _keys_of(Where, "where.")


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
        in_toml = "" if default is None or is_left_out else json.dumps(default)
        yield CatalogEntry(name, meanings[field.name], in_words(kind), in_toml)
