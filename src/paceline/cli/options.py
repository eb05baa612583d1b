"""Options of commands: derived from the functions behind them; and how texts on a command line are read.

A command names what is its own, such as `--json`, and takes the rest as `**options`: the parameters of its workflow,
with the defaults there and the help of the docstring. `OPTIONS` says what neither tells.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from paceline.errors import (
    InvalidFileError,
    JobError,
    LaunchError,
    PacelineError,
    WorkerFailed,
    did_you_mean,
    shortened,
)
from paceline.spec import Job
from paceline.spec.job import parse_setting
from paceline.workflows.arguments import parameter_types
from paceline.workflows.catalog import field_meanings
from paceline.workflows.strategy import Strategy
from paceline.workflows.where import Where

OUTPUT = "Output and debugging"
GROUPS: Mapping[type, str] = {Where: "where", Strategy: "plan"}
"""Dataclasses whose fields are options or, where a command has `--set`, keys in a table of this name."""
OPTIONS_BESIDE_KEYS = frozenset({"hosts", "launcher", "strategy"})
"""Fields that are options all the same."""
PLAN_KEYS = frozenset({"threads", "algorithm", "servers", "debug_comm", "cluster"})
"""Parameters that are keys of the table "plan" where a command has `--set` and trains."""

AsJson = Annotated[
    bool, typer.Option("--json", rich_help_panel=OUTPUT, help="End with one line of JSON on standard output.")
]
OnlyJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON and nothing else.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", rich_help_panel=OUTPUT, help="Print what would be started, and start nothing.")
]


def parse_tolerance(text: str) -> float:
    """ "1%" and "0.01" both mean one point of accuracy. Raises `JobError` for anything else."""
    try:
        value = float(text.removesuffix("%") if text.isascii() else "") / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise JobError(f"--tolerance {shortened(text)} should be a fraction of accuracy such as 1% or 0.01.")
    return value


def parse_size(text: str, option: str) -> int:
    """ "4K" and "4KiB" are 4096 bytes, "100MB" 100,000,000. Raises `JobError` naming the option."""
    found = re.fullmatch(r"(0*[1-9][0-9]{0,14}) ?([KMG]?)(iB|B|)", text.strip(), re.IGNORECASE)
    if found is None:
        raise JobError(f"{option} {shortened(text)} should be a number of bytes such as 4096, 4K, 16MiB or 100MB.")
    number, prefix, suffix = found.groups()
    base = 1000 if suffix.upper() == "B" else 1024
    return int(number) * int(base ** " KMG".index(prefix.upper() or " "))


def parse_hours(text: str) -> float:
    """ "2:30" is two hours and a half, in seconds. Raises `LaunchError` for anything else."""
    found = re.fullmatch("([0-9]{1,5}):([0-5]?[0-9])", text)
    minutes = 0 if found is None else 60 * int(found[1]) + int(found[2])
    if not minutes:
        raise LaunchError(f"--time {shortened(text)} should be hours and minutes, such as 2:30.")
    return 60.0 * minutes


def reads(parse: Callable[..., Any], *more: Any) -> Callable[[Any], Any]:
    """A parser for an option: `parse` for texts, with further arguments; a default is a value already."""

    def value_of(given: Any) -> Any:
        return parse(given, *more) if isinstance(given, str) else given

    return value_of


def _size(option: str, **details: Any) -> dict[str, Any]:
    return {"names": (option,), "metavar": "SIZE", "parser": reads(parse_size, option), **details}


ARGUMENTS = frozenset({"job", "script", "command", "place", "checkpoint", "target"})
"""Parameters that a command line gives by their place."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "budget": {"metavar": "SECONDS"},
    "checkpoint": {"kind": str, "metavar": "CHECKPOINT"},
    "cluster": {
        "help": "The file of `paceline probe`, for a forecast beside the measurement; ignored where there is none.",
    },
    "command": {"metavar": "COMMAND"},
    "container": {"metavar": "IMAGE"},
    "cut": {"metavar": "MODULE"},
    "data": {"kind": str, "metavar": "DIR", "help": "The data set's directory; used as it is."},
    "efficiency_floor": {"max": 1},
    "folder": {"metavar": "DIR"},
    "hang_timeout_s": {"names": ("--hang-timeout",), "min": 1.0},
    "hosts": {"metavar": "a:8,b:8"},
    "job": {"kind": str, "metavar": "JOB"},
    "keep_best": {"metavar": "METRIC"},
    "keep_busy": {"names": ("--all",)},
    "keep_every_hours": {"metavar": "H"},
    "link_rate": {"metavar": "BYTES/S", "min": 1},
    "max_minutes": {
        "metavar": "MINUTES",
        "help": "Save and end this many minutes after the launch; the same command with the same --out resumes.",
    },
    "max_restarts": {"min": 0},
    "memory_bytes": _size("--memory"),
    "mount": {"metavar": "DIR"},
    "module": {"names": ("-m", "--module"), "help": "SCRIPT is the name of a module, as for python -m."},
    "noise_scale": {"metavar": "SAMPLES", "min": 1},
    "on_cpu": {"names": ("--cpu",)},
    "out": {"metavar": "DIR"},
    "pick": {"metavar": "K", "min": None},
    "place": {"kind": str, "metavar": "DIR"},
    "price": {"metavar": "AMOUNT"},
    "python": {"metavar": "PATH"},
    "script": {"kind": str, "metavar": "SCRIPT"},
    "settings": {"names": ("--set",), "metavar": "KEY=VALUE"},
    "source": {"kind": str, "names": ("--from",), "metavar": "FILE"},
    "strategy": {"metavar": "NAME|MESH"},
    "target": {"kind": str, "metavar": "FILE"},
    "target_samples": {"metavar": "SAMPLES", "min": 1},
    "time_limit_s": {"names": ("--time",), "metavar": "H:MM", "parser": reads(parse_hours)},
    "tolerance": {
        "metavar": "ACCURACY",
        "parser": reads(parse_tolerance),
        "show_default": "1%",
        "help": "Accuracy that may be lost, such as 1% or 0.005.",
    },
    "track": {"metavar": "NAME", "rich_help_panel": OUTPUT},
    "workers": {"names": ("--workers", "-n")},
}
"""By the name of a parameter: arguments of `typer.Option`; the option's `names`, where its own is not the one; and its
`kind` where it may be a path or something else, such as the address of a checkpoint or the name of a recipe."""

IN_PYTHON = frozenset({"model", "callbacks", "arguments", "say", "announce", "on_each", "quiet"})
"""Parameters that no command line can give."""

_METAVARS: Mapping[type, str] = {Path: "FILE", str: "NAME", int: "N", float: "X"}
_KINDS = (*_METAVARS, bool)
"""Types of options; of a parameter that takes several of them, an option takes the first here."""
_LEAST: Mapping[type, int] = {int: 1, float: 0}


def options_of(
    workflow: Callable[..., Any], **details: Mapping[str, Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the `**options` of a command become the parameters of a workflow that the command does not name.

    The command-line library reads the options of a command from its signature. Fields of `where` and `strategy` become
    options, or keys that `--set` takes. The command gets no value where none was given and none is the default.

    Args:
        details: by the name of a parameter, what `OPTIONS` says for this command only.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        taken = {*IN_PYTHON, *(one.name for one in own)}
        parameters, meanings = inspect.signature(workflow).parameters, meanings_of(workflow)
        hints, keys = parameter_types(workflow), keys_of(workflow)
        derived: list[inspect.Parameter] = []
        groups: dict[str, tuple[type, list[inspect.Parameter]]] = {}
        for name, parameter in parameters.items():
            group = _group_of(hints[name])
            if group is not None:
                groups[name] = group, [one for one in _fields(group) if f"{GROUPS[group]}.{one.name}" not in keys]
            elif name not in taken and f"plan.{name}" not in keys:
                meaning = meanings.get(name, "")
                if name == "settings" and keys:
                    meaning = f"{meaning} Others, such as plan.threads=4: see `paceline list keys`."
                said = _said(name, meaning, details.get(name))
                derived.append(_parameter(name, hints[name], parameter.default, said))
        derived += [one for _, fields in groups.values() for one in fields]
        names = _option_names(derived)

        @functools.wraps(command)
        def with_options(**values: Any) -> None:
            try:
                given = {one.name: values[one.name] for one in own}
                if "quiet" in parameters:
                    given["quiet"] = False
                settings, chosen = split_settings(values.get("settings") or (), keys)
                if "settings" in values:
                    values["settings"] = settings or None
                for name, (group, fields) in groups.items():
                    in_group = {key: chosen.pop(key) for key in list(chosen) if key in get_type_hints(group)}
                    given[name] = group(**{one.name: values.pop(one.name) for one in fields}, **in_group)
                command(**{name: value for name, value in values.items() if value is not None} | chosen | given)
            except PacelineError as error:
                if not isinstance(error, InvalidFileError | WorkerFailed):  # which quote what a file or worker says
                    error.args = (naming_options(str(error), names), *error.args[1:])
                raise

        # The library takes names and defaults from the signature, and types from the annotations.
        flat = [one.replace(kind=one.KEYWORD_ONLY) for one in (*derived, *own)]
        with_options.__annotations__ = {one.name: one.annotation for one in flat}
        with_options.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
        return with_options

    return decorated


def keys_of(workflow: Callable[..., Any]) -> dict[str, str]:
    """The keys beside those of a job that `--set` of a command takes, such as "plan.threads", and what they mean.

    A workflow that takes no settings has none: there they are options.
    """
    found: dict[str, str] = {}
    parameters, hints = inspect.signature(workflow).parameters, parameter_types(workflow)
    if "settings" not in parameters:
        return found
    for name in parameters:
        group = _group_of(hints[name])
        if group is not None:
            meanings = field_meanings(group)
            found |= {
                f"{GROUPS[group]}.{field}": _as_help(meaning)
                for field, meaning in meanings.items()
                if field not in OPTIONS_BESIDE_KEYS
            }
        elif name in PLAN_KEYS and "where" in parameters:
            found[f"plan.{name}"] = meanings_of(workflow)[name]
    return found


def split_settings(settings: Sequence[str], keys: Mapping[str, str]) -> tuple[list[str], dict[str, Any]]:
    """Settings of the job, and the values of `keys` by the names of parameters and fields."""
    of_job, chosen = [], {}
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if not key.startswith(tuple(f"{table}." for table in GROUPS.values())):
            of_job.append(setting)
            continue
        if key not in keys:
            raise JobError(f"There is no key '{shortened(key)}' here: {did_you_mean(key, keys)}{_there(keys)}")
        (_, name), value = parse_setting(setting)
        is_one_of_a_list = name == "cut" and isinstance(value, str)
        chosen[name] = Path(str(value)) if name == "hosts_file" else [value] if is_one_of_a_list else value
    return of_job, chosen


def _there(keys: Mapping[str, str]) -> str:
    return (
        f"beside those of a job there are {', '.join(sorted(keys))}." if keys else "this command takes keys of a job."
    )


def _group_of(hint: Any) -> type | None:
    """Which of `GROUPS` a parameter takes."""
    return next((one for one in GROUPS if one in _members(hint)), None)


def _option_names(parameters: Sequence[inspect.Parameter]) -> dict[str, str]:
    """The option that gives each parameter, by its name. Keys of a job keep their names, as `--set` takes them."""
    keys = {field.name for field in dataclasses.fields(Job)}
    return {
        one.name: next((name for name in one.default.param_decls if name.startswith("--")), _option(one.name))
        for one in parameters
        if one.name not in ARGUMENTS | keys
    }


def naming_options(message: str, names: Mapping[str, str]) -> str:
    """A sentence that names parameters, as it names options: "max_steps = 5 is" as "--max-steps 5 is", and
    "with force = True" as "with --force".

    Names of one word are words of the language too, and are replaced before "=" only.
    """
    for name, option in names.items():
        before_value = "( = True| =)?" if "_" in name else "( = True| =(?= ))"
        message = re.sub(rf"(?<![\w.\-/'\"]){name}\b(?![.(]\w){before_value}", option, message)
    return message


@functools.cache  # several commands have the same options
def meanings_of(workflow: Callable[..., Any]) -> dict[str, str]:
    """What the docstring of a function says of its parameters, as the help of options."""
    section = (inspect.getdoc(workflow) or "").partition("Args:\n")[2].partition("\n\n")[0]
    meanings = {}
    for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
        other = re.fullmatch(r"as for `(\w+)`\.", text)
        for name in names.split(", "):
            meanings[name] = _as_help(text) if other is None else meanings_of(_beside(workflow, other[1]))[name]
    return meanings


def _beside(workflow: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The workflow of that name in the same module, or in a module of its name."""
    here = vars(sys.modules[workflow.__module__])
    found: Callable[..., Any] = here.get(name) or vars(import_module(f"paceline.workflows.{name}"))[name]
    return found


def _as_help(text: str) -> str:
    """ "number of nodes; None: all of them." as "Number of nodes (default: all of them).", values without quotes."""
    plain = re.sub(r"\s+", " ", text).translate(str.maketrans("", "", '`"'))
    plain = re.sub(r"; None: ([^.;]+)", r" (default: \1)", plain)
    return plain if text.startswith('"') else plain[0].upper() + plain[1:]


@functools.cache
def _fields(group: type) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters of a command; the texts below them are their help."""
    hints, meanings = get_type_hints(group), field_meanings(group)
    return [
        _parameter(one.name, hints[one.name], one.default, _said(one.name, _as_help(meanings[one.name])))
        for one in dataclasses.fields(group)
    ]


def _said(name: str, meaning: str, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The help of a parameter, what `OPTIONS` says of it, and on top what a command says."""
    return {"help": meaning, **OPTIONS.get(name, {}), **(details or {})}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _parameter(name: str, hint: Any, default: Any, details: Mapping[str, Any]) -> inspect.Parameter:
    """A parameter of a command, for one of a workflow or for a field."""
    members, details = _members(hint), dict(details)
    is_list = any(get_origin(one) in (Sequence, list) for one in members)
    kind = details.pop("kind", None) or next((one for one in _KINDS if one in members), list[str] if is_list else hint)
    details = {"metavar": _METAVARS.get(kind), "min": _LEAST.get(kind)} | details
    default = details.pop("default", ... if default is inspect.Parameter.empty else default)
    if details.get("parser") is not None:
        kind = Any
        del details["min"]
    elif kind == list[str]:
        default = None
        details["help"] += " Repeatable."
    if kind is not Any and default is None:
        kind = kind | None
    names = details.pop("names", (_option(name),) if kind is bool and not default else ())
    said: Any = typer.Argument(default, **details) if name in ARGUMENTS else typer.Option(default, *names, **details)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=said, annotation=kind)


def to_stderr(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)
