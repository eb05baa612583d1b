"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.errors import JobError
from paceline.spec import AlgorithmName

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job file (TOML) or the name of a recipe.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job, such as optim.lr=0.1. Repeatable."),
]
DataDir = Annotated[str | None, typer.Option("--data", metavar="DIR", help="The data set's directory; used as it is.")]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="End after this many optimizer updates.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON on standard output.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads a worker computes with.")]
MicroBatch = Annotated[
    int | None,
    typer.Option("--micro-batch-size", min=1, help="Most samples in one forward pass of a worker."),
]
Algorithm = Annotated[
    AlgorithmName,
    typer.Option(help="How gradients are summed; auto: the fastest, by measurement at the start."),
]
Servers = Annotated[int, typer.Option(min=1, help="Workers that also serve, with parameter servers.")]
DebugComm = Annotated[
    bool,
    typer.Option("--debug-comm", help="Compare every collective across workers, and let NCCL say what it does."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")]
Trackers = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="Also log to tensorboard, wandb or mlflow. Repeatable."),
]


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
        raise JobError(f"--tolerance {text} should be a part of accuracy such as 1% or 0.01.")
    return value
