"""Arguments of `train`, `launch` and others: where workers run, and whether a run restarts after a failure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paceline.errors import LaunchError
from paceline.launch.elastic import ElasticLimits
from paceline.launch.node_list import NodeSlots, parse_node_list, read_node_file
from paceline.launch.team import HANG_TIMEOUT_S
from paceline.workflows.jobs import check_counts

LauncherName = Literal["auto", "local", "debug", "ssh", "slurm", "ray"]
_MAX_RESTARTS = 3


@dataclass(frozen=True)
class Where:
    """Where workers run; the default is this node. Example: `Where(hosts="gpu1:8,gpu2:8")`.

    The fields are options of the command line too, with the metadata as arguments of `typer.Option`.
    """

    launcher: LauncherName = field(
        default="auto",
        metadata={
            "help": "How nodes are reached; slurm and ray: those of the allocation or cluster; debug: no process."
        },
    )
    hosts: str | None = field(
        default=None, metadata={"help": "Nodes and the number of workers on each.", "metavar": "a:8,b:8"}
    )
    hosts_file: Path | None = field(
        default=None, metadata={"help": "Nodes from a file, one on each line: name slots=8."}
    )
    interface: str | None = field(
        default=None, metadata={"help": "Network interface between nodes (default: found by trying)."}
    )
    container: str | None = field(
        default=None,
        metadata={"help": "Run in image.sif, docker://NAME@sha256:… or podman://NAME.", "metavar": "IMAGE"},
    )
    python: str | None = field(
        default=None, metadata={"help": "The interpreter on other nodes (default: as here).", "metavar": "PATH"}
    )
    hang_timeout_s: float = field(
        default=HANG_TIMEOUT_S,
        metadata={"help": "Seconds to wait for a silent worker or node.", "names": ("--hang-timeout",), "min": 1.0},
    )

    def __post_init__(self) -> None:
        if not 1 <= self.hang_timeout_s < math.inf:
            raise LaunchError(f"--hang-timeout {self.hang_timeout_s} should be a number of seconds from 1 on.")

    def named_hosts(self) -> tuple[NodeSlots, ...]:
        """The nodes that are named. Raises `LaunchError` where they are named twice, or a name is invalid."""
        if self.hosts is not None and self.hosts_file is not None:
            raise LaunchError("--hosts and --hosts-file name nodes twice; give one of them.")
        if self.hosts is not None:
            return parse_node_list(self.hosts)
        return () if self.hosts_file is None else read_node_file(self.hosts_file)


HERE = Where()


@dataclass(frozen=True)
class Elastic:
    """Whether and how a run restarts after a failure; by default it ends. Example: `Elastic(min_workers=4)`."""

    min_workers: int | None = field(
        default=None, metadata={"help": "Go on after a failure with at least so many workers.", "min": 1}
    )
    max_workers: int | None = field(
        default=None, metadata={"help": "Never more workers, when nodes come back.", "min": 1}
    )
    max_restarts: int | None = field(
        default=None,
        metadata={
            "help": "Start again after a failure, so often without progress between (default: 3 with --min-workers).",
            "min": 0,
        },
    )
    exclude_slower: float | None = field(
        default=None,
        metadata={
            "help": "Go on without a worker that lastingly takes X times as long as the others.",
            "min": 1.0,
            "metavar": "X",
        },
    )
    standby: bool = field(
        default=True, metadata={"help": "Keep a process on every node that has torch loaded, for quick restarts."}
    )

    def __post_init__(self) -> None:
        check_counts(min_workers=self.min_workers, max_workers=self.max_workers)
        if self.exclude_slower is not None and not 1 <= self.exclude_slower < math.inf:
            raise LaunchError(f"--exclude-slower {self.exclude_slower} should be a finite number of 1 or more.")

    def limits(self, num_workers: int) -> ElasticLimits | None:
        """The limits of a run that starts with `num_workers`; None where a failure is to end it.

        Without `min_workers` it is started again with as many as before.

        Raises:
            LaunchError: options that contradict each other.
        """
        if self.min_workers is None:
            for option, value in (("--max-workers", self.max_workers), ("--exclude-slower", self.exclude_slower)):
                if value is not None:
                    raise LaunchError(f"{option} goes with --min-workers: with how few workers may the run go on?")
            return ElasticLimits(num_workers, num_workers, self.max_restarts) if self.max_restarts else None
        most = min(num_workers, self.max_workers or num_workers)
        if self.min_workers > most:
            raise LaunchError(f"--min-workers {self.min_workers} is more than the {most} workers of this run.")
        return ElasticLimits(self.min_workers, most, _MAX_RESTARTS if self.max_restarts is None else self.max_restarts)


RIGID = Elastic()
"""A failure ends the run."""
