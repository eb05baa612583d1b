"""Arguments and options that several commands share, and how texts on a command line are read."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from paceline.errors import JobError, shortened
from paceline.spec import AlgorithmName
from paceline.spec.forecast import Grow
from paceline.spec.micro_batch import parse_micro_batch
from paceline.workflows.strategy import Strategy
from paceline.workflows.where import Elastic, Where

TUNING = "Speed and memory"
OUTPUT = "Output and debugging"
"""Groups of options in the help of a command; fields of `Where`, `Elastic` and `Strategy` have their own."""

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job file (TOML) or the name of a recipe.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job, such as optim.lr=0.1. Repeatable."),
]
DataDir = Annotated[str | None, typer.Option("--data", metavar="DIR", help="The data set's directory; used as it is.")]
MaxSteps = Annotated[int | None, typer.Option(min=1, metavar="N", help="End after this many optimizer updates.")]
Quiet = Annotated[bool, typer.Option("--quiet", rich_help_panel=OUTPUT, help="Show no progress.")]
AsJson = Annotated[
    bool, typer.Option("--json", rich_help_panel=OUTPUT, help="End with one line of JSON on standard output.")
]
OnlyJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON and nothing else.")]
Workers = Annotated[
    int | None, typer.Option("--workers", "-n", min=1, metavar="N", help="Number of workers (default: all devices).")
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, metavar="N", rich_help_panel=TUNING, help="CPU threads that each worker computes with."
    ),
]
MicroBatch = Annotated[
    Any,
    typer.Option(
        "--micro-batch",
        "--micro-batch-size",
        metavar="SAMPLES|auto",
        rich_help_panel=TUNING,
        parser=parse_micro_batch,
        help="Most samples in one forward pass of a worker; auto: as many as memory has room for.",
    ),
]
Algorithm = Annotated[
    AlgorithmName,
    typer.Option(
        metavar="NAME",
        rich_help_panel=TUNING,
        help="How gradients are summed; auto: the fastest, by measurement at the start.",
    ),
]
Servers = Annotated[
    int,
    typer.Option(min=1, metavar="N", rich_help_panel=TUNING, help="Workers that also serve, with parameter servers."),
]
Tolerance = Annotated[str, typer.Option(help="Accuracy that may be lost, such as 1%.")]
EfficiencyFloor = Annotated[float, typer.Option(min=0, max=1, help="Least scaling efficiency worth recommending.")]
GrowOption = Annotated[Grow, typer.Option(help="none: same global batch on every count; batch: same batch per device.")]
ClusterFile = Annotated[
    Path,
    typer.Option(
        "--cluster",
        metavar="FILE",
        rich_help_panel=TUNING,
        help="What paceline probe wrote; adds a forecast to the measurement.",
    ),
]
DebugComm = Annotated[
    bool,
    typer.Option(
        "--debug-comm",
        rich_help_panel=OUTPUT,
        help="Compare every collective across workers, and turn on NCCL's debug output.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", rich_help_panel=OUTPUT, help="Print what would be started, and start nothing.")
]
Trackers = Annotated[
    list[str] | None,
    typer.Option(
        "--track", metavar="NAME", rich_help_panel=OUTPUT, help="Also log to tensorboard, wandb or mlflow. Repeatable."
    ),
]
GROUPS: Mapping[type, str] = {
    Where: "Where workers run",
    Elastic: "After a failure",
    Strategy: "How the model is spread",
}
"""Dataclasses whose fields are options, and what the help of a command calls them."""


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


_METAVARS: Mapping[Any, str] = {
    int: "N",
    int | None: "N",
    float: "X",
    float | None: "X",
    str | None: "NAME",
    Path | None: "FILE",
}


def _options(group: type) -> list[inspect.Parameter]:
    """The fields of a dataclass as parameters of a command; their metadata is what `typer.Option` takes."""
    types = get_type_hints(group)
    parameters = []
    for one in dataclasses.fields(group):
        kind = types[one.name]
        details: dict[str, Any] = {"metavar": _METAVARS.get(kind)} | dict(one.metadata)
        default = typer.Option(one.default, *details.pop("names", ()), rich_help_panel=GROUPS[group], **details)
        parameters.append(inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return parameters


def to_stderr(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)


def parse_counts(text: str, option: str) -> list[int]:
    """ "1,2,4" as [1, 2, 4], ascending. Raises `JobError` naming the option."""
    if not re.fullmatch(r"\s*0*[1-9][0-9]{0,6}\s*(,\s*0*[1-9][0-9]{0,6}\s*)*", text):
        raise JobError(f"{option} {shortened(text)} should be numbers of workers such as 1,2,4.")
    return sorted({int(part) for part in text.split(",")})


def parse_tolerance(text: str) -> float:
    """ "1%" and "0.01" both mean one point of accuracy. Raises `JobError` for anything else."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise JobError(f"--tolerance {shortened(text)} should be a fraction of accuracy such as 1% or 0.01.")
    return value


def parse_size(text: str, option: str) -> int:
    """ "4K" and "4KiB" are 4096 bytes, "100MB" 100,000,000. Raises `JobError` naming the option."""
    found = re.fullmatch(r"([0-9]{1,15}) ?([KMG]?)(iB|B|)", text.strip(), re.IGNORECASE)
    if found is None:
        raise JobError(f"{option} {shortened(text)} should be a number of bytes such as 4096, 4K, 16MiB or 100MB.")
    number, prefix, suffix = found.groups()
    base = 1000 if suffix.upper() == "B" else 1024
    return int(number) * int(base ** " KMG".index(prefix.upper() or " "))
