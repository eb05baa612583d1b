"""Arguments of `train`, `launch` and others: where workers run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import LaunchError, shown
from paceline.launch.node_list import NodeSlots, parse_node_list, read_node_file
from paceline.workflows.arguments import check_fields

LauncherName = Literal["auto", "local", "debug", "ssh", "slurm", "ray"]


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
    hang_timeout_s: float | None = None
    """Seconds that workers of a run may wait for another one; None: 60, and before the first step as long as torch."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hang_timeout_s is not None and not 1 <= self.hang_timeout_s < math.inf:
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
