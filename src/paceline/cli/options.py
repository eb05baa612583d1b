"""Arguments and options that several commands share, and how texts on a command line are read."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import JobError
from paceline.spec import AlgorithmName
from paceline.spec.forecast import Grow
from paceline.spec.mesh import ScheduleName
from paceline.workflows.strategy import Strategy
from paceline.workflows.where import Elastic, LauncherName, Where

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
    int | None,
    typer.Option("--micro-batch-size", min=1, help="Most samples in one forward pass of a worker."),
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
StrategyName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|MESH",
        help="How workers divide the model: dp (the default; named, it is checked to fit), fsdp, zero1, zero2, "
        "hsdp, pp, tp, dp_one_process, a mesh such as 'dp2 x pp2', or auto: the planner chooses.",
    ),
]

GROUPS: dict[type, dict[str, Any]] = {
    Where: {
        "launcher": Annotated[
            LauncherName,
            typer.Option(
                help="How nodes are reached; slurm and ray: those of the allocation or cluster; debug: no process."
            ),
        ],
        "hosts": Annotated[
            str | None, typer.Option(metavar="a:8,b:8", help="Nodes and the number of workers on each.")
        ],
        "hosts_file": Annotated[Path | None, typer.Option(help="Nodes from a file, one on each line: name slots=8.")],
        "interface": Annotated[
            str | None, typer.Option(help="Network interface between nodes (default: found by trying).")
        ],
        "container": Annotated[
            str | None, typer.Option(metavar="IMAGE", help="Run in image.sif, docker://NAME@sha256:… or podman://NAME.")
        ],
        "python": Annotated[
            str | None,
            typer.Option(metavar="PATH", help="The interpreter on other nodes (default: as here)."),
        ],
        "hang_timeout_s": Annotated[
            float, typer.Option("--hang-timeout", min=1.0, help="Seconds to wait for a silent worker or node.")
        ],
    },
    Elastic: {
        "min_workers": Annotated[
            int | None, typer.Option(min=1, help="Go on after a failure with at least so many workers.")
        ],
        "max_workers": Annotated[int | None, typer.Option(min=1, help="Never more workers, when nodes come back.")],
        "max_restarts": Annotated[
            int | None, typer.Option(min=0, help="Restarts in a row without progress (default: 3 with --min-workers).")
        ],
        "exclude_slower": Annotated[
            float | None,
            typer.Option(
                min=1.0, metavar="X", help="Go on without a worker that lastingly takes X times as long as the others."
            ),
        ],
        "standby": Annotated[
            bool, typer.Option(help="Keep a process on every node that has torch loaded, for quick restarts.")
        ],
    },
    Strategy: {
        "strategy": StrategyName,
        "schedule": Annotated[ScheduleName, typer.Option(help="In which order a pipeline's stages take turns.")],
        "stages_per_worker": Annotated[
            int, typer.Option(min=1, help="Stages each worker of a pipeline computes, with the schedule interleaved.")
        ],
        "cut": Annotated[
            list[str] | None,
            typer.Option(
                metavar="MODULE", help="A module that begins a stage (default: stages of equal time). Repeatable."
            ),
        ],
        "recompute": Annotated[
            bool, typer.Option("--recompute", help="Compute activations again in backward instead of keeping them.")
        ],
        "sequence_parallel": Annotated[
            bool,
            typer.Option(
                "--sequence-parallel",
                help="Between layers divided by tp, each worker keeps a slice of the positions.",
            ),
        ],
        "cpu_offload": Annotated[
            bool, typer.Option("--cpu-offload", help="Keep sharded parameters in CPU memory while they are not used.")
        ],
    },
}
"""The options of a command that takes these values as parameters: one for each field."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with an option for each field of `Where`, `Elastic` and `Strategy` in place of such parameters.

    The command-line library reads the options of a command from its signature.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {name: p.annotation for name, p in signature.parameters.items() if p.annotation in GROUPS}
    flat = []
    for name, parameter in signature.parameters.items():
        options = GROUPS[groups[name]] if name in groups else {name: parameter.annotation}
        defaults = inspect.signature(groups[name]).parameters if name in groups else {name: parameter}
        for option, annotation in options.items():
            default = defaults[option].default
            flat.append(inspect.Parameter(option, parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        together = {name: kind(**{field: values.pop(field) for field in GROUPS[kind]}) for name, kind in groups.items()}
        command(**together, **values)

    with_options.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    return with_options


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
