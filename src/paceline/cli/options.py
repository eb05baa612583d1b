"""Options of commands: derived from the functions behind them; and how texts on a command line are read.

A command takes the parameters of its function of `paceline`, with the defaults there and the help of the docstring.
`OPTIONS` says what neither tells.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import paceline
from paceline.errors import InvalidFileError, PacelineError, WorkerFailed, did_you_mean
from paceline.spec.codec import from_mapping
from paceline.spec.job import with_settings
from paceline.workflows.arguments import members_of, parameter_types
from paceline.workflows.catalog import field_meanings
from paceline.workflows.where import Where

_WHERE_OPTIONS = frozenset({"hosts", "launcher"})
"""Fields of `Where` that are options even where a command has `--set`, which takes the others as keys "where."."""
IN_PYTHON = frozenset({"model", "callbacks", "say", "quiet", "arguments", "torchrun", "trace"})
"""Parameters that are no options."""
ARGUMENTS = frozenset({"job", "script", "command", "place", "checkpoint", "target", "runs", "prefix"})
"""Parameters that a command line gives by their place."""


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "as_json": {"names": ("--json",), "help": "End with one line of JSON on standard output."},
    "data": {"metavar": "DIR", "help": "The data set's directory; used as it is."},
    "dry_run": {"help": "Show what would be done, and do nothing."},
    "dry_run_mesh": {"action": "store", "help": "Trace the job on a mesh, such as 'dp128 x tp8', without its devices."},
    "hang_timeout_s": {"names": ("--hang-timeout",), "metavar": "SECONDS"},
    "keep_busy": {"names": ("--all",)},
    "module": {"names": ("--module", "-m"), "help": "SCRIPT is the name of a module, as for python -m."},
    "on_cpu": {"names": ("--cpu",)},
    "place": {"metavar": "DIR"},
    "runs": {"nargs": "+", "metavar": "runs"},
    "settings": {
        "names": ("--set",),
        "metavar": "KEY=VALUE",
        "help": "A key, as optim.lr=0.1; see paceline list keys.",
    },
    "show_all": {"names": ("--all",), "help": "Also list what is fine."},
    "source": {"names": ("--from",), "help": "Read nvidia-smi topo -m or cluster.json; /dev/stdin is standard input."},
    "strict": {"help": "Exit with 1 for warnings too."},
    "target": {"metavar": "FILE"},
    "workers": {"names": ("--workers", "-n")},
}
"""By the name of a parameter, or of an option that a command has beside its function: arguments of
`ArgumentParser.add_argument`; and the option's `names`, where its own is not the one."""

TakesArguments = Literal["none", "others", "rest"]
"""Which words of a command line go on to something else, as `arguments`: those that are not known here, or all behind
the first argument."""


@dataclass(frozen=True)
class Command:
    """A command: what it does, the function of `paceline` whose parameters are its options, and options of its own."""

    run: Callable[..., int | None]
    """Takes what the command line says, by the names of parameters; returns the exit code, None for 0."""
    function: str
    """Such as "train" or "checkpoint.ls"."""
    own: tuple[str, ...]
    takes_arguments: TakesArguments

    @property
    def help(self) -> str:
        return inspect.getdoc(self.run) or ""

    @property
    def parameters(self) -> list[Parameter]:
        """What a command line can give: parameters of the function, and then the options of the command alone."""
        own = inspect.signature(self.run).parameters
        found = [one for one in parameters_of(self.function) if one.name not in IN_PYTHON]
        for place, one in enumerate(found):
            if one.default is None and one.name in own and own[one.name].default:  # files are written here
                meaning = one.meaning.partition(" (default:")[0] + "."
                found[place] = dataclasses.replace(one, default=own[one.name].default, meaning=meaning)
        return found + [Parameter(name, bool, False, "") for name in self.own]


COMMANDS: dict[str, Command] = {}
"""The commands by their names, in the order of their definition."""
Run = TypeVar("Run", bound=Callable[..., int | None])


def command(
    name: str, *own: str, function: str | None = None, takes_arguments: TakesArguments = "none"
) -> Callable[[Run], Run]:
    """A decorator for what a command does; see `Command`."""

    def register(run: Run) -> Run:
        COMMANDS[name] = Command(run, function or name.replace(" ", "."), own, takes_arguments)
        return run

    return register


@dataclass(frozen=True)
class Parameter:
    """What a command line can give: a parameter of a function, or a field of one that is a dataclass."""

    name: str
    kind: Any
    default: Any
    meaning: str
    is_of_where: bool = False


def function_of(name: str) -> Callable[..., Any]:
    """The function of `paceline` behind a command."""
    function: Callable[..., Any] = operator.attrgetter(name)(paceline)
    return function


@functools.cache
def parameters_of(function_name: str) -> list[Parameter]:
    """The parameters of a function of `paceline`, and fields of `Where` in place of `where`."""
    function = function_of(function_name)
    kinds, meanings = parameter_types(function), meanings_of(function)
    found: list[Parameter] = []
    for name, one in inspect.signature(function).parameters.items():
        if name != "where":
            found.append(Parameter(name, kinds[name], one.default, meanings.get(name, "")))
            continue
        field_kinds, texts = get_type_hints(Where), field_meanings(Where)
        for each in dataclasses.fields(Where):
            if each.name in _WHERE_OPTIONS or "settings" not in kinds:
                meaning = _as_help(texts[each.name])
                found.append(Parameter(each.name, field_kinds[each.name], each.default, meaning, is_of_where=True))
    return found


@functools.cache  # several commands have the same options
def meanings_of(function: Callable[..., Any]) -> dict[str, str]:
    """What the docstring of a function says of its parameters, as the help of options."""
    section = (inspect.getdoc(function) or "").partition("Args:\n")[2].partition("\n\n")[0]
    meanings = {}
    for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
        other = re.fullmatch(r"as for `(\w+)`\.", text)
        for name in names.split(", "):
            meanings[name] = _as_help(text) if other is None else meanings_of(_beside(function, other[1]))[name]
    return meanings


def _beside(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function of that name in the same module, or in a module of its name."""
    here = vars(sys.modules[function.__module__])
    found: Callable[..., Any] = here.get(name) or vars(import_module(f"paceline.workflows.{name}"))[name]
    return found


def _as_help(text: str) -> str:
    """ "number of nodes; None: all of them." as "Number of nodes (default: all of them).", values without quotes."""
    plain = re.sub(r"\s+", " ", text).translate(str.maketrans("", "", '`"'))
    plain = re.sub(r"; None: ([^.;]+)", r" (default: \1)", plain)
    return plain if text.startswith('"') else plain[0].upper() + plain[1:]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PacelineError(f"{message.rstrip('.')}; see `{self.prog} --help`.")


class _PassOn(argparse.Action):
    """Collects options of another program, with their values, as words."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        words = [*getattr(namespace, self.dest, ()), option, *([values] if isinstance(values, str) else [])]
        setattr(namespace, self.dest, words)


def parser_of(name: str, command: Command) -> argparse.ArgumentParser:
    """The parser of a command. Its values are those that the command line gives; the function knows the others."""
    parser = _Parser(
        f"paceline {name}", description=command.help, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    for one in command.parameters:
        _add_to(parser, one)
    if command.takes_arguments == "rest":
        rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="What follows goes on to it.")
        rest.required = False
    if command.function == "launch":
        from paceline.workflows.launch import TORCHRUN_FLAGS, TORCHRUN_OPTIONS

        for option in TORCHRUN_FLAGS:
            parser.add_argument(option, action=_PassOn, dest="torchrun", nargs=0, help=argparse.SUPPRESS)
        for option in TORCHRUN_OPTIONS:
            parser.add_argument(option, action=_PassOn, dest="torchrun", help=argparse.SUPPRESS)
    return parser


def _add_to(parser: argparse.ArgumentParser, one: Parameter) -> None:
    said = {"help": one.meaning, **OPTIONS.get(one.name, {})}
    members, names = members_of(one.kind), said.pop("names", (_option_name(one.name),))
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
    if one.default and isinstance(one.default, str | Path | float):
        said["help"] += f" (default: {one.default})"
    said["help"] = said["help"].replace("%", "%%")
    is_required = one.default is inspect.Parameter.empty
    if one.name in ARGUMENTS:
        parser.add_argument(
            one.name, **({"metavar": one.name.upper()} | ({} if is_required else {"nargs": "?"}) | said)
        )
    else:
        parser.add_argument(*names, dest=one.name, required=is_required, **said)


def call(name: str, command: Command, words: Sequence[str]) -> int | None:
    """Run a command; sentences about parameters of its function name its options."""
    try:
        return command.run(**parse(name, command, words))
    except PacelineError as error:
        if not isinstance(error, InvalidFileError | WorkerFailed):  # which quote what a file or worker says
            names = [one.name for one in command.parameters if one.name not in ARGUMENTS]
            error.args = (naming_options(str(error), names), *error.args[1:])
        raise


def parse(name: str, command: Command, words: Sequence[str]) -> dict[str, Any]:
    """What a command line gives to a command, by the names of parameters.

    Raises:
        PacelineError: an option that is not there, or a value that cannot be read.
    """
    parser, after = parser_of(name, command), []
    if command.takes_arguments == "others" and "--" in words:
        words, after = words[: words.index("--")], list(words[words.index("--") + 1 :])
    read, others = parser.parse_known_args(words)
    given, known = vars(read), [one.name for one in parameters_of(command.function)]
    if command.takes_arguments == "others":
        given["arguments"] = [*others, *after]
    elif others:
        options = [_option_name(one.name) for one in command.parameters]
        parser.error(f"unrecognized arguments: {' '.join(others)}{did_you_mean(others[0], options, ' ({})')}")
    if "where" in parameter_types(function_of(command.function)):
        settings = given.get("settings", [])
        of_where = [one for one in settings if one.startswith("where.")]
        fields = {one.name for one in command.parameters if one.is_of_where} & given.keys()
        keys = with_settings({"where": {one: given.pop(one) for one in fields}}, of_where)
        given["where"] = from_mapping(Where, keys["where"], "where" if of_where else "")
        given |= {"settings": [one for one in settings if one not in of_where]} if of_where else {}
    return given | ({"quiet": False} if "quiet" in known else {}) | ({"say": to_stderr} if "say" in known else {})


def naming_options(message: str, names: Sequence[str]) -> str:
    """A sentence that gives values to parameters, as it gives them to options: "max_steps = 5 is" as "--max-steps 5
    is", and "with force = True" as "with --force"."""
    found = rf"(?<![\w.\-/'\"])({'|'.join(names)}) = (True\b)?"
    return re.sub(found, lambda told: _option_name(told[1]) + ("" if told[2] else " "), message)


def _option_name(name: str) -> str:
    """The option that gives a parameter, the long one where there are two."""
    return str(OPTIONS.get(name, {}).get("names", (f"--{name.replace('_', '-')}",))[0])


def to_stderr(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)
