"""The commands that a run would start, as text for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.launch.commands import WORKER, Rendezvous, rendezvous_on_one_node, worker_commands
from paceline.launch.team import LaunchOptions
from paceline.spec import Plan
from paceline.workflows.launchers import node_access
from paceline.workflows.where import Where


def dry_run(
    plan: Plan, program: Sequence[str], run_dir: Path, where: Where, environ: Mapping[str, str] | None = None
) -> str:
    """The commands of every worker, as text; starts nothing and opens no connection."""
    lines = [f"# {plan.world_size} workers, launcher {where.launcher}, backend {plan.backend}"]
    if first := plan.placements[0].hostname:
        place = f"tcp://ADDRESS_OF_{first}:PORT_BOUND_THERE"
        rendezvous = Rendezvous(place, tuple(where.interface or "INTERFACE_THAT_REACHES_IT" for _ in plan.nodes))
    else:
        rendezvous = rendezvous_on_one_node(Path("NEW_FOLDER"))
    options = LaunchOptions(run_dir, environ=environ or {})
    commands = worker_commands(plan, program, options, rendezvous, launched_at=0.0)
    for number, placement in enumerate(plan.placements):
        if node := placement.hostname:
            access = node_access(where, node)
            lines += ["", f"# node {node}: {shlex.join(access.argv([access.python, '-m', 'paceline', 'agent']))}"]
        for command in (command for command in commands if command.node == number):
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(command.variables.items()))
            argv = [where.python or WORKER[0], *WORKER[1:], *command.program]
            lines += [f"# rank {command.rank}", f"{variables} {shlex.join(argv)}"]
    return "\n".join(lines)
