"""Commands and their options: made of the functions behind them, their parameters, types, defaults and docstrings.

`OPTIONS` says what a function does not tell.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import paceline
from paceline.errors import InvalidFileError, PacelineError, WorkerFailed, did_you_mean
from paceline.spec.codec import from_mapping
from paceline.spec.job import with_settings
from paceline.workflows.arguments import field_meanings, members_of, parameter_types
from paceline.workflows.where import Where

_WHERE_OPTIONS = frozenset({"hosts", "launcher"})
"""Fields of `Where` that are options even where a command has `--set`, which takes the others as keys "where."."""
IN_PYTHON = frozenset({"model", "callbacks", "say", "quiet", "arguments", "where"})
"""Parameters that are no options, or not as they are."""
_BY_PLACE = frozenset({"job", "script", "command", "place", "checkpoint", "target", "runs", "what", "prefix"})
"""Parameters that a command line gives by their place."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "as_json": {"names": ("--json",), "help": "End with one line of JSON on standard output."},
    "data": {"metavar": "DIR", "help": "The folder with the files of the data set, in place of data.dir."},
    "dry_run": {"help": "Show what would be done, and do nothing."},
    "dry_run_mesh": {"action": "store", "metavar": "MESH", "help": "What a device of a mesh such as fsdp4 would hold."},
    "hang_timeout_s": {"names": ("--hang-timeout",), "metavar": "SECONDS"},
    "module": {"names": ("--module", "-m"), "help": "SCRIPT is the name of a module, as for python -m."},
    "on_cpu": {"names": ("--cpu",)},
    "place": {"metavar": "DIR"},
    "runs": {"nargs": "+", "metavar": "runs"},
    "settings": {
        "names": ("--set",),
        "metavar": "KEY=VALUE",
        "help": "A key and its value, such as optim.lr=0.1; see paceline list keys.",
    },
    "show_all": {"names": ("--all",), "help": "Also list what is fine."},
    "source": {"names": ("--from",), "help": "What nvidia-smi topo -m printed, or cluster.json; /dev/stdin: a pipe."},
    "target": {"metavar": "FILE"},
    "torchrun": {"metavar": "ARGUMENT"},
    "what": {"metavar": None},
    "workers": {"names": ("--workers", "-n")},
}
"""By the name of a parameter, or of an option that a command has beside its function: arguments of
`ArgumentParser.add_argument`; and the option's `names`, where its own is not the one."""


@dataclass(frozen=True)
class Command:
    """A command: what it does with what a command line gives, and the function of `paceline` whose options it has."""

    run: Callable[..., int | None]
    """Takes the values that are given, by the names of parameters; returns the exit code, None for 0."""
    function_name: str
    """Such as "train" or "checkpoint.ls"."""
    own: Mapping[str, Any]
    """Defaults of the command alone, of options that the function has, and of others."""
    passes_on: Literal["nothing", "others", "rest"]
    """The words that go on to something else, as `arguments`: those that are not known here, or all behind the first
    argument."""

    @property
    def help(self) -> str:
        return inspect.getdoc(self.run) or ""

    @property
    def function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = operator.attrgetter(self.function_name)(paceline)
        return function


COMMANDS: dict[str, Command] = {}
"""The commands by their names, in the order of their definition."""
Function = TypeVar("Function", bound=Callable[..., int | None])


def command(
    name: str, *, function: str = "", passes_on: Literal["nothing", "others", "rest"] = "nothing", **own: Any
) -> Callable[[Function], Function]:
    """A decorator for what a command does; see `Command`."""

    def register(run: Function) -> Function:
        COMMANDS[name] = Command(run, function or name.replace(" ", "."), own, passes_on)
        return run

    return register


def option_of(name: str) -> str:
    """The option that gives a parameter, the long one where there are two."""
    return str(OPTIONS.get(name, {}).get("names", (f"--{name.replace('_', '-')}",))[0])


@functools.cache  # several commands have the same options
def meanings_of(function: Callable[..., Any]) -> dict[str, str]:
    """What the docstring of a function says of its parameters, as the help of options."""
    section = (inspect.getdoc(function) or "").partition("Args:\n")[2].partition("\n\n")[0]
    meanings = {}
    for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
        other = re.fullmatch(r"as for `(\w+)`\.", text)
        for name in names.split(", "):
            if other is None:
                meanings[name] = _as_help(text)
            else:  # a function beside this one, or of paceline
                beside = vars(sys.modules[function.__module__])
                meanings[name] = meanings_of(beside.get(other[1]) or getattr(paceline, other[1])).get(name, "")
    return meanings


def _as_help(text: str) -> str:
    """ "number of nodes; None: all of them." as "Number of nodes (default: all of them).", values without quotes."""
    plain = re.sub(r"\s+", " ", text).translate(str.maketrans("", "", '`"'))
    plain = re.sub(r"; None: ([^.;]+)", r" (default: \1)", plain)
    return plain if text.startswith('"') else plain[0].upper() + plain[1:]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PacelineError(f"{message.rstrip('.')}; see `{self.prog} --help`.")


def parser_of(name: str, command: Command) -> argparse.ArgumentParser:
    """The parser of a command. Its values are those that the command line gives; the function knows the others."""
    parser = _Parser(
        f"paceline {name}", description=command.help, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    kinds, meanings = parameter_types(command.function), meanings_of(command.function)
    for one in inspect.signature(command.function).parameters.values():
        if one.name not in IN_PYTHON:
            _add_to(parser, one.name, kinds[one.name], command.own.get(one.name, one.default), meanings[one.name])
    if "where" in kinds:
        where_kinds, texts = get_type_hints(Where, include_extras=True), field_meanings(Where)
        for field in dataclasses.fields(Where):
            if field.name in _WHERE_OPTIONS or "settings" not in kinds:
                _add_to(parser, field.name, where_kinds[field.name], field.default, _as_help(texts[field.name]))
    for own in (name for name in command.own if name not in kinds):
        _add_to(parser, own, bool, False, "")
    if command.passes_on == "rest":
        rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="What follows goes on to it.")
        rest.required = False
    return parser


def _add_to(parser: argparse.ArgumentParser, name: str, hint: Any, default: Any, meaning: str) -> None:
    """Let a parser read a parameter of this type."""
    said = {"help": meaning, **OPTIONS.get(name, {})}
    members, names = members_of(hint), said.pop("names", (option_of(name),))
    kind = next((kind for kind in (str, Path, int, float, bool) if kind in members), None)
    if kind is bool:
        said = {"action": "store_true", **said}
    elif kind is not None:
        said = {"type": kind, **({"metavar": "N"} if kind is int else {}), **said}
    elif any(get_origin(one) is Sequence for one in members) and "nargs" not in said:
        said |= {"action": "append", "help": f"{said['help']} Repeatable."}
        members = get_args(members[0])
    if get_origin(members[0]) is Literal:
        said["choices"] = get_args(members[0])
    is_required = default is inspect.Parameter.empty
    if not is_required and default and isinstance(default, str | Path | int | float):
        said["help"] = re.sub(r" \(default: .*?\)", "", said["help"]) + f" (default: {default})"
    said["help"] = said["help"].replace("%", "%%")
    if name in _BY_PLACE:
        parser.add_argument(name, **({"metavar": name.upper()} | ({} if is_required else {"nargs": "?"}) | said))
    else:
        parser.add_argument(*names, dest=name, required=is_required, **said)


def call(name: str, command: Command, words: Sequence[str]) -> int | None:
    """Run a command; sentences that give values to parameters, as "max_steps = 5" and "force = True", name its options:
    "--max-steps 5" and "--force"."""

    def named(told: re.Match[str]) -> str:
        return option_of(told[1]) + ("" if told[2] else " ") if option_of(told[1]) in options else told[0]

    try:
        return command.run(**parse(name, command, words))
    except PacelineError as error:
        if not isinstance(error, InvalidFileError | WorkerFailed):  # which quote what a file or worker says
            options = options_in(parser_of(name, command))
            error.args = (re.sub(r"(?<![\w.\-/'\"])(\w+) = (True\b)?", named, str(error)), *error.args[1:])
        raise


def options_in(parser: argparse.ArgumentParser) -> list[str]:
    """The long options of a parser."""
    return re.findall(r"--[a-z][a-z-]*", parser.format_help())


def parse(name: str, command: Command, words: Sequence[str]) -> dict[str, Any]:
    """What a command line gives to a command, by the names of parameters. Raises `PacelineError` for an option that is
    not there, or a value that cannot be read."""
    parser, after = parser_of(name, command), []
    if command.passes_on == "others" and "--" in words:
        words, after = words[: words.index("--")], list(words[words.index("--") + 1 :])
    read, others = parser.parse_known_args(words)
    given, taken = vars(read), inspect.signature(command.function).parameters
    if command.passes_on == "others":
        given["arguments"] = [*others, *after]
    elif others:
        meant = did_you_mean(others[0], options_in(parser), " ({})")
        parser.error(f"unrecognized arguments: {' '.join(others)}{meant}")
    if "where" in taken:
        settings = given.get("settings", [])
        of_where = [one for one in settings if one.startswith("where.")]
        fields = {one.name: given.pop(one.name) for one in dataclasses.fields(Where) if one.name in given}
        keys = with_settings({"where": fields}, of_where)
        given["where"] = from_mapping(Where, keys["where"], "where" if of_where else "")
        given |= {"settings": [one for one in settings if one not in of_where]} if of_where else {}
    in_a_terminal = {"quiet": False, "say": to_stderr}
    return given | {name: value for name, value in in_a_terminal.items() if name in taken}


def to_stderr(line: str) -> None:
    """Print a line on standard error; its reader may have ended, or its disk be full: a run does not end by that."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)
