"""Arguments of `train`, `launch` and others: where workers run, and whether a run restarts after a failure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import LaunchError, shown
from paceline.launch.elastic import ElasticLimits
from paceline.launch.node_list import NodeSlots, parse_node_list, read_node_file
from paceline.launch.team import HANG_TIMEOUT_S
from paceline.workflows.arguments import check_fields
from paceline.workflows.jobs import check_counts

LauncherName = Literal["auto", "local", "debug", "ssh", "slurm", "ray"]
_MAX_RESTARTS = 3


@dataclass(frozen=True)
class Where:
    """Where workers run; the default is this node. Example: `Where(hosts="gpu1:8,gpu2:8")`.

    The fields are options of the command line too; the text below each is its help.
    """

    launcher: LauncherName = "auto"
    """How workers are started; slurm, ray: on the allocation or cluster; debug: in this process."""
    hosts: str | None = None
    """Nodes and the number of workers on each."""
    hosts_file: Path | None = None
    """Nodes from a file, one on each line: name slots=8."""
    interface: str | None = None
    """Network interface that nodes use between each other, or several as "a,b"; None: found automatically."""
    container: str | None = None
    """Run in image.sif, docker://NAME@sha256:… or podman://NAME."""
    python: str | None = None
    """The Python interpreter on other nodes; None: the same path as here."""
    hang_timeout_s: float = HANG_TIMEOUT_S
    """Seconds without a heartbeat after which a worker or node counts as hung."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.hang_timeout_s < math.inf:
            raise LaunchError(f"hang_timeout_s = {self.hang_timeout_s} should be a number of seconds, 1 or more.")

    def named_hosts(self) -> tuple[NodeSlots, ...]:
        """The nodes that are named. Raises `LaunchError` where they are named twice, or a name is invalid."""
        if self.hosts is not None and self.hosts_file is not None:
            raise LaunchError(
                f"hosts = {shown(self.hosts)} and hosts_file = {shown(str(self.hosts_file))} both name nodes; give one."
            )
        if self.hosts is not None:
            return parse_node_list(self.hosts)
        return () if self.hosts_file is None else read_node_file(self.hosts_file)


HERE = Where()


@dataclass(frozen=True)
class Elastic:
    """Whether and how a run restarts after a failure; by default it ends. Example: `Elastic(min_workers=4)`."""

    min_workers: int | None = None
    """After a failure, go on with the workers that are left, if there are at least this many."""
    max_workers: int | None = None
    """Most workers to use when nodes come back."""
    max_restarts: int | None = None
    """Restarts after failures without progress between them; None: 0, or 3 where fewer workers may go on."""
    exclude_slower: float | None = None
    """Go on without a worker that takes X times as long as the others for a long time."""
    standby: bool = True
    """Keep a process with torch loaded on every node, so that restarts are quick."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_counts(min_workers=self.min_workers, max_workers=self.max_workers, max_restarts=self.max_restarts or None)
        if self.exclude_slower is not None and not 1 <= self.exclude_slower < math.inf:
            raise LaunchError(f"exclude_slower = {self.exclude_slower} should be a finite number of 1 or more.")

    def limits(self, num_workers: int) -> ElasticLimits | None:
        """The limits of a run that starts with `num_workers`; None where a failure is to end it.

        Without `min_workers` it is started again with as many as before.

        Raises:
            LaunchError: options that contradict each other.
        """
        if self.min_workers is None:
            for option, value in (("max_workers", self.max_workers), ("exclude_slower", self.exclude_slower)):
                if value is not None:
                    raise LaunchError(
                        f"{option} = {value} needs min_workers, the fewest workers that the run may go on with."
                    )
            return ElasticLimits(num_workers, num_workers, self.max_restarts) if self.max_restarts else None
        most = min(num_workers, self.max_workers or num_workers)
        if self.min_workers > most:
            raise LaunchError(f"min_workers = {self.min_workers} is more than the {most} workers of this run.")
        return ElasticLimits(self.min_workers, most, _MAX_RESTARTS if self.max_restarts is None else self.max_restarts)


RIGID = Elastic()
"""A failure ends the run."""
