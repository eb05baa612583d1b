"""Arguments and options that several commands share, and how texts on a command line are read."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from paceline.errors import JobError
from paceline.spec import AlgorithmName
from paceline.spec.forecast import Grow
from paceline.spec.micro_batch import parse_micro_batch
from paceline.workflows.strategy import Strategy
from paceline.workflows.where import Elastic, Where

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job file (TOML) or the name of a recipe.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job, such as optim.lr=0.1. Repeatable."),
]
DataDir = Annotated[str | None, typer.Option("--data", metavar="DIR", help="The data set's directory; used as it is.")]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="End after this many optimizer updates.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON on standard output.")]
OnlyJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON and nothing else.")]
Workers = Annotated[
    int | None, typer.Option("--workers", "-n", min=1, help="Number of workers (default: all devices).")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads that each worker computes with.")]
MicroBatch = Annotated[
    Any,
    typer.Option(
        "--micro-batch",
        "--micro-batch-size",
        metavar="SAMPLES|auto",
        parser=parse_micro_batch,
        help="Most samples in one forward pass of a worker; auto: as many as memory has room for.",
    ),
]
Algorithm = Annotated[
    AlgorithmName,
    typer.Option(help="How gradients are summed; auto: the fastest, by measurement at the start."),
]
Servers = Annotated[int, typer.Option(min=1, help="Workers that also serve, with parameter servers.")]
Tolerance = Annotated[str, typer.Option(help="Accuracy that may be lost, such as 1%.")]
EfficiencyFloor = Annotated[float, typer.Option(min=0, max=1, help="Least scaling efficiency worth recommending.")]
GrowOption = Annotated[Grow, typer.Option(help="none: same global batch on every count; batch: same batch per device.")]
ClusterFile = Annotated[
    Path,
    typer.Option("--cluster", metavar="FILE", help="What paceline probe wrote; adds a forecast to the measurement."),
]
DebugComm = Annotated[
    bool,
    typer.Option("--debug-comm", help="Compare every collective across workers, and turn on NCCL's debug output."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")]
Trackers = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="Also log to tensorboard, wandb or mlflow. Repeatable."),
]
GROUPS = (Where, Elastic, Strategy)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with an option for each field of `Where`, `Elastic` and `Strategy` in place of such parameters.

    The command-line library reads the options of a command from its signature.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {name: _options(p.annotation) for name, p in signature.parameters.items() if p.annotation in GROUPS}
    parameters = [groups.get(name, [parameter]) for name, parameter in signature.parameters.items()]
    flat = [one.replace(kind=one.KEYWORD_ONLY) for several in parameters for one in several]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        together = {
            name: signature.parameters[name].annotation(**{one.name: values.pop(one.name) for one in options})
            for name, options in groups.items()
        }
        command(**together, **values)

    # Of the signature it takes names and defaults, of the annotations the types.
    with_options.__annotations__ = {one.name: one.annotation for one in flat}
    with_options.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    return with_options


def _options(group: type) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters of a command; their metadata is what `typer.Option` takes."""
    types = get_type_hints(group)
    parameters = []
    for one in dataclasses.fields(group):
        details = dict(one.metadata)
        default = typer.Option(one.default, *details.pop("names", ()), **details)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(one.name, kind, default=default, annotation=types[one.name]))
    return parameters


def to_stderr(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)


def parse_counts(text: str, option: str) -> list[int]:
    """ "1,2,4" as [1, 2, 4], ascending. Raises `JobError` naming the option."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise JobError(f"{option} {text} should be numbers of workers such as 1,2,4.")
    return counts


def parse_tolerance(text: str) -> float:
    """ "1%" and "0.01" both mean one point of accuracy. Raises `JobError` for anything else."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise JobError(f"--tolerance {text} should be a fraction of accuracy such as 1% or 0.01.")
    return value


def parse_size(text: str, option: str) -> int:
    """ "4K" and "4KiB" are 4096 bytes, "100MB" 100,000,000. Raises `JobError` naming the option."""
    found = re.fullmatch(r"(\d+) ?([KMG]?)(iB|B|)", text.strip(), re.IGNORECASE)
    if found is None:
        raise JobError(f"{option} {text} should be a number of bytes such as 4096, 4K, 16MiB or 100MB.")
    number, prefix, suffix = found.groups()
    base = 1000 if suffix.upper() == "B" else 1024
    return int(number) * int(base ** " KMG".index(prefix.upper() or " "))
