"""Where workers run, and whether a run goes on after a failure: what `train`, `launch` and others take as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import LaunchError
from paceline.launch.elastic import ElasticLimits
from paceline.launch.node_list import NodeSlots, parse_node_list, read_node_file
from paceline.launch.team import HANG_TIMEOUT_S

LauncherName = Literal["auto", "local", "debug", "ssh", "slurm", "ray"]
_MAX_RESTARTS = 3


@dataclass(frozen=True)
class Where:
    """Where workers run; the default is this node. Example: `Where(hosts="gpu1:8,gpu2:8")`."""

    launcher: LauncherName = "auto"
    """How nodes are reached. slurm and ray: the nodes of the allocation or cluster; debug: in this very process."""
    hosts: str | None = None
    """Nodes and their numbers of workers, "a:8,b:8"."""
    hosts_file: Path | None = None
    """The same in a file, a node on each line: "name slots=8"."""
    interface: str | None = None
    """The network interface between nodes; None: one on which all nodes reach the first."""
    container: str | None = None
    """An image to run in: image.sif, docker://NAME@sha256:… or podman://NAME."""
    python: str | None = None
    """The interpreter on other nodes; None: the path of this one."""
    hang_timeout_s: float = HANG_TIMEOUT_S
    """How long workers may wait for another one, or a node be silent, before the run is ended."""

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
    """Whether and how a run goes on after a failure; by default it ends. Example: `Elastic(min_workers=4)`."""

    min_workers: int | None = None
    """Go on after a failure with at least so many workers; None: a failure ends the run."""
    max_workers: int | None = None
    """Never more workers than this when nodes come back; None: as many as at the start."""
    max_restarts: int | None = None
    """Restarts in a row without progress; None: 3."""
    exclude_slower: float | None = None
    """Go on without a worker that lastingly takes so many times as long as the others."""
    standby: bool = True
    """Keep a process on every node that has torch loaded, for quick restarts."""

    def limits(self, num_workers: int) -> ElasticLimits | None:
        """The limits of a run that starts with `num_workers`; None where a failure is to end it.

        Raises:
            LaunchError: options that contradict each other.
        """
        if self.min_workers is None:
            given = (
                ("--max-workers", self.max_workers),
                ("--max-restarts", self.max_restarts),
                ("--exclude-slower", self.exclude_slower),
            )
            for option, value in given:
                if value is not None:
                    raise LaunchError(f"{option} goes with --min-workers: with how few workers may the run go on?")
            return None
        most = min(num_workers, self.max_workers or num_workers)
        if self.min_workers > most:
            raise LaunchError(f"--min-workers {self.min_workers} is more than the {most} workers of this run.")
        return ElasticLimits(self.min_workers, most, _MAX_RESTARTS if self.max_restarts is None else self.max_restarts)


RIGID = Elastic()
"""A failure ends the run."""
