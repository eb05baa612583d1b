"""The command line: one file a command, nothing heavy loaded before a command needs it."""

from __future__ import annotations

import errno
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from paceline import __version__
from paceline.cli import (
    bench,
    catalog,
    checkpoint,
    doctor,
    launch,
    memory,
    new,
    plan,
    probe,
    report,
    scale,
    submit,
    topo,
    train,
    verify,
    watch,
)
from paceline.errors import PacelineError, WorkerFailed, printable, shown
from paceline.workflows.agent import agent

INTERRUPTED = 130
"""The exit code of Ctrl-C: 128 + SIGINT, as shells have it; the command-line library makes one of the other."""


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"paceline {__version__}")
        raise typer.Exit


class PipelineOrder(TyperGroup):
    """The pipeline's order, in which the library would put commands that have commands of their own last."""

    def list_commands(self, ctx: Any) -> list[str]:
        last = ("checkpoint", "export", "watch", "report", "doctor", "new", "jobs", "models", "data")
        return sorted(super().list_commands(ctx), key=lambda name: last.index(name) + 1 if name in last else 0)


app = typer.Typer(
    name="paceline",
    cls=PipelineOrder,
    help="Add devices, keep the accuracy, know the gain before you pay for it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
# In the order of the pipeline.
app.command("topo")(topo.topo)
app.command("probe")(probe.probe)
app.command("plan")(plan.plan)
app.command("memory")(memory.memory)
app.command("launch", context_settings=launch.CONTEXT)(launch.launch)
app.command("train")(train.train)
app.command("scale")(scale.scale)
app.command("verify", context_settings=verify.CONTEXT)(verify.verify)
app.add_typer(submit.app, name="submit")
app.add_typer(bench.app, name="bench")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("export")(checkpoint.export)
app.command("watch")(watch.watch)
app.command("report")(report.report)
app.command("doctor")(doctor.doctor)
app.command("new")(new.new)
app.add_typer(catalog.app, name="jobs")
app.command("models")(catalog.models)
app.command("data")(catalog.data)
app.command("agent", hidden=True)(agent)


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Add devices, keep the accuracy, know the gain before you pay for it."""


def main() -> None:
    """Run a command. A user's mistake is one sentence and an exit code; a bug keeps its traceback."""
    try:
        exit_code = app(standalone_mode=False)
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
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"paceline: {shown(str(error.filename))} is longer than a file's name can be.", file=sys.stderr)
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
