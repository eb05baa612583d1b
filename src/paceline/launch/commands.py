"""What to start: the command line and the variables of every worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import env
from paceline.errors import LaunchError

if TYPE_CHECKING:
    from paceline.launch.team import LaunchOptions
    from paceline.spec import Plan


WORKER = (sys.executable, "-m", "paceline.launch.worker")
"""The program that runs the worker's program."""


@dataclass(frozen=True)
class WorkerCommand:
    """How one worker is started."""

    rank: int
    node: int
    """The index of the worker's node in the plan."""
    program: tuple[str, ...]
    """What follows `WORKER` on its command line."""
    variables: dict[str, str]
    """Environment variables that the worker gets in addition to those of its node."""


@dataclass(frozen=True)
class Rendezvous:
    """How the workers of a run find each other."""

    init_method: str
    """ "file:///path" of a file that does not exist yet, or "tcp://address:port" of a socket that listens already."""
    interfaces: tuple[str | None, ...]
    """The network interface for workers on each node, or several as "a,b"; None: what the environment names."""
    port: int | None = None
    """The port of the socket that listens on the first node."""
    torch_store: tuple[str, int] | None = None
    """Address and port of the socket on the first node for programs that call `init_process_group` by themselves."""


def rendezvous_on_one_node(rendezvous_dir: Path, torch_store: tuple[str, int] | None = None) -> Rendezvous:
    """Rendezvous in a file of a new, empty folder: nothing listens on a port, so jobs that start simultaneously cannot
    connect to each other, and nothing of a run leaves the loopback interface unless the user named another."""
    init_method = f"file://{rendezvous_dir.absolute()}/store"
    return Rendezvous(init_method, (env.own_interface() or "lo",), torch_store=torch_store)


def worker_commands(
    plan: Plan,
    program: Sequence[str],
    options: LaunchOptions,
    rendezvous: Rendezvous,
    launched_at: float,
) -> list[WorkerCommand]:
    """One command per rank of `plan`, in rank order; starts nothing and touches no file.

    `program` is what would follow `python` on a command line: ("train.py", "--flag") or ("-m", "a.module").
    `launched_at` is in seconds since the epoch.

    Raises:
        LaunchError: a node's share does not fit its workers.
    """
    commands: list[WorkerCommand] = []
    for node, (share, interface) in enumerate(zip(plan.placements, rendezvous.interfaces, strict=True)):
        if share.devices and len(share.devices) < share.num_workers:
            raise LaunchError(
                f"{share.num_workers} workers cannot share {len(share.devices)} GPUs "
                f"of {share.hostname or 'this node'}; give every worker one."
            )
        for local_rank in range(share.num_workers):
            facts = env.WorkerFacts(
                rank=len(commands),
                world_size=plan.world_size,
                local_rank=local_rank,
                local_world_size=share.num_workers,
                init_method=rendezvous.init_method,
                started_by="paceline",
            )
            variables = env.worker_variables(
                facts,
                node=node,
                num_nodes=len(plan.placements),
                restart=options.restart,
                torch_store=rendezvous.torch_store,
                run_dir=options.run_dir.absolute(),  # a script may change its working directory
                threads_per_worker=plan.threads_per_worker,
                launched_at=launched_at,
                interface=interface,
                devices=share.devices,
                cpus=share.cpus[local_rank] if share.cpus else (),
                debug_comm=plan.debug_comm,
            )
            commands.append(WorkerCommand(len(commands), node, tuple(program), variables | dict(options.environ)))
    return commands
