"""The launchers: how each finds nodes and runs a program on one of them, as a row of a table."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from paceline import env
from paceline.errors import LaunchError
from paceline.launch.node_list import NodeSlots
from paceline.launch.ray import ray_argv, ray_nodes
from paceline.launch.remote_team import NodeAccess
from paceline.launch.slurm import allocation, srun_argv
from paceline.launch.ssh import explain_ssh_failure, ssh_argv
from paceline.workflows.where import LauncherName, Where


@dataclass(frozen=True)
class Launcher:
    """What distinguishes one launcher from another; the defaults run programs on this node."""

    nodes: Callable[[], tuple[NodeSlots, ...]] = lambda: (NodeSlots(socket.gethostname()),)
    """The nodes where the user names none: those that a scheduler allocated to this command, or this node."""
    argv: Callable[..., Sequence[str]] = lambda _node, program, **_here: program
    """(node, program, *, cwd, environ) -> the local command whose standard streams are those of the program there."""
    explain: Callable[[int, str, str], str | None] = lambda _exit_code, _stderr, _node: None
    """(exit code, standard error, node) -> why the program could not run there, and the remedy; None if unknown."""
    reserves_gpus: bool = False
    """Whether `argv` also takes `num_gpus`, which the program needs there: as many as `nodes` lists."""


LAUNCHERS: dict[LauncherName, Launcher] = {
    "local": Launcher(),
    "debug": Launcher(),
    "ssh": Launcher(argv=ssh_argv, explain=explain_ssh_failure),
    "slurm": Launcher(nodes=lambda: allocation(env.everything()), argv=srun_argv),
    "ray": Launcher(nodes=ray_nodes, argv=ray_argv, reserves_gpus=True),
}


def chosen_launcher(launcher: LauncherName, slots: Sequence[NodeSlots]) -> LauncherName:
    """The launcher that "auto" means.

    Raises:
        LaunchError: there is no such launcher, or it needs nodes, or takes none.
    """
    if launcher not in get_args(LauncherName):
        raise LaunchError(f"There is no launcher {launcher!r}; use one of {', '.join(get_args(LauncherName))}.")
    if launcher == "auto":
        return "ssh" if slots else "local"
    if launcher in ("local", "debug") and slots:
        raise LaunchError(f"launcher = {launcher!r} runs on this node alone; leave hosts out.")
    if launcher == "ssh" and not slots:
        raise LaunchError("launcher = 'ssh' needs nodes: hosts = 'a:8,b:8', or a hosts_file.")
    return launcher


def node_access(where: Where, node: str, num_gpus: int = 0) -> NodeAccess:
    """How the launcher of `where` runs a program on a node, in this working directory.

    Args:
        num_gpus: how many GPUs the program needs there, for launchers that reserve them.
    """
    launcher = LAUNCHERS[where.launcher]
    here: dict[str, Any] = {"cwd": Path.cwd(), "environ": env.passed_on()}
    if launcher.reserves_gpus:
        here["num_gpus"] = num_gpus
    return NodeAccess(
        node,
        argv=lambda program: launcher.argv(node, program, **here),
        explain=lambda exit_code, stderr: launcher.explain(exit_code, stderr, node),
        python=where.python or sys.executable,
    )
