"""The command line: one file a command, nothing heavy loaded before a command needs it."""

from __future__ import annotations

import codecs
import errno
import io
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from paceline import __version__
from paceline.errors import PacelineError, WorkerFailed, printable, shown

INTERRUPTED = 130
"""The exit code of Ctrl-C: 128 + SIGINT, as shells have it; the command-line library makes one of the other."""

COMMANDS = {
    "topo": "paceline.cli.topo:topo",
    "probe": "paceline.cli.probe:probe",
    "plan": "paceline.cli.plan:plan",
    "launch": "paceline.cli.launch:launch",
    "train": "paceline.cli.train:train",
    "scale": "paceline.cli.scale:scale",
    "verify": "paceline.cli.verify:verify",
    "submit": "paceline.cli.submit:app",
    "checkpoint": "paceline.cli.checkpoint:app",
    "watch": "paceline.cli.watch:watch",
    "report": "paceline.cli.report:report",
    "doctor": "paceline.cli.doctor:doctor",
    "list": "paceline.cli.catalog:app",
}
"""Where each command is, in the order of the pipeline: a function, or a group of commands."""

FORMER_NAMES = {
    "memory": "`paceline plan JOB`, or without devices `paceline plan JOB --dry-run-mesh fsdp4`",
    "jobs": "`paceline list recipes` and `paceline list keys`",
    "models": "`paceline list models`",
    "data": "`paceline list data`",
    "export": "`paceline checkpoint export`",
    "new": "`paceline train RECIPE`, or a job file as in README.md",
    "bench": "the scripts in benchmarks/ of the repository",
}
"""What stands in the place of a command of version 0.2."""


class PipelineOrder(TyperGroup):
    """The pipeline's order, in which the library would put commands that have commands of their own last."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=list(COMMANDS).index)


def command_line(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with the commands of these names; what other commands need is not loaded."""
    app = typer.Typer(
        name="paceline",
        cls=PipelineOrder,
        help="Add devices, keep the accuracy, know the gain before you pay for it.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_options)
    for name in names:
        place, _, attribute = COMMANDS[name].partition(":")
        module = import_module(place)
        command = getattr(module, attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            settings = getattr(module, "CONTEXT", None)
            app.command(name, context_settings=settings)(command)
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"paceline {__version__}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Add devices, keep the accuracy, know the gain before you pay for it."""


def main() -> None:
    """Run a command. A user's mistake is one sentence and an exit code; a bug keeps its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")  # what its encoding does not have is written as in Python
    word = "".join(sys.argv[1:2])
    if word in FORMER_NAMES:
        print(f"paceline: there is no command {word} any more; use {FORMER_NAMES[word]}.", file=sys.stderr)
        sys.exit(PacelineError.exit_code)
    named = [word] if word in COMMANDS else COMMANDS
    try:
        exit_code = command_line(named)(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except TyperException as mistake:
        sys.exit(_explain(mistake))
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        sys.stdout = None
        sys.exit(1)
    except PacelineError as error:
        if isinstance(error, WorkerFailed) and error.details:
            print(printable(error.details.rstrip()), file=sys.stderr)
        print(f"paceline: {error}", file=sys.stderr)
        if isinstance(error, WorkerFailed) and error.report:
            print(f"The report: {error.report}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            sys.stdout = None  # it would be tried once more
            print(f"paceline: the output, or a file, cannot be written: {error.strerror}.", file=sys.stderr)
        elif error.errno == errno.ENAMETOOLONG:
            print(f"paceline: {shown(str(error.filename))} is longer than a file's name can be.", file=sys.stderr)
        else:
            raise
        sys.exit(PacelineError.exit_code)
    if exit_code == INTERRUPTED:
        print("paceline: interrupted; all workers have ended.", file=sys.stderr)
    sys.exit(exit_code)


def _explain(mistake: TyperException) -> int:
    """Say what is wrong with a command line; returns the exit code."""
    message = mistake.format_message().replace("Value error, ", "").rstrip(".")
    if message:  # else help was asked for, and printed
        context = getattr(mistake, "ctx", None)
        command = "paceline" if context is None else context.command_path
        print(f"paceline: {message}; see `{command} --help`.", file=sys.stderr)
    return mistake.exit_code
