"""The command line: parse, call a function of `paceline`, print. Nothing heavy is loaded before a command needs it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from paceline import __version__
from paceline.errors import PacelineError, WorkerFailed, did_you_mean, printable

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


def main() -> None:
    """Run a command. A user's mistake is one sentence and an exit code; a bug keeps its traceback."""
    try:
        exit_code = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("paceline: interrupted; all workers have ended.", file=sys.stderr)
        exit_code = 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        sys.stdout = None
        exit_code = 1
    except PacelineError as error:
        if isinstance(error, WorkerFailed) and error.details:
            print(printable(error.details.rstrip()), file=sys.stderr)
        print(f"paceline: {error}", file=sys.stderr)
        if isinstance(error, WorkerFailed) and error.report:
            print(f"The report: {error.report}", file=sys.stderr)
        exit_code = error.exit_code
    sys.exit(exit_code)


def run(words: Sequence[str]) -> int:
    """Run the command of a command line without `paceline` in front; returns the exit code."""
    from paceline.cli.commands import COMMANDS, runs_script
    from paceline.cli.options import call

    if runs_script("".join(words[:1]), words):
        words = ["launch", *words[1:]]
    for name in (" ".join(words[:2]), " ".join(words[:1])):
        if name in COMMANDS:
            return call(name, COMMANDS[name], words[len(name.split()) :]) or 0
    group = "".join(words[:1])
    within = [name for name in COMMANDS if name.startswith(f"{group} ")]
    if group in FORMER_NAMES:
        raise PacelineError(f"There is no `paceline {group}` any more; use {FORMER_NAMES[group]}.")
    if group == "--version":
        print(f"paceline {__version__}")
    elif group in ("", "--help", "-h") or (within and words[1:2] in ([], ["--help"], ["-h"])):
        print(overview(within or list(COMMANDS)))
    else:
        name, of_group = (" ".join(words[:2]), f" {group}") if within else (group, "")
        raise PacelineError(
            f"There is no command {name}; {did_you_mean(name, within or COMMANDS)}see `paceline{of_group} --help`."
        )
    return 0


def overview(names: Sequence[str]) -> str:
    """The help of the command line as a whole: a line for each of these commands."""
    from paceline.cli.commands import COMMANDS

    lines = [f"  {name:<18} {COMMANDS[name].help.splitlines()[0]}" for name in names]
    usage = "usage: paceline COMMAND ...; paceline COMMAND --help lists the options of a command; --version"
    return "\n".join([usage, "", "Add devices, keep the accuracy, know the gain before you pay for it.", "", *lines])
