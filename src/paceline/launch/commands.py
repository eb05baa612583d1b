"""What to start: the command line and the environment of every worker."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import env
from paceline.errors import LaunchError

if TYPE_CHECKING:
    from paceline.spec import Plan


@dataclass(frozen=True)
class WorkerCommand:
    """How one worker is started: its command line and its whole environment."""

    argv: tuple[str, ...]
    environ: dict[str, str]
    rank: int


def worker_commands(
    plan: Plan,
    program: Sequence[str],
    *,
    run_dir: Path,
    rendezvous_dir: Path,
    launched_at: float,
    environ: Mapping[str, str] | None = None,
) -> list[WorkerCommand]:
    """One command per rank of `plan`, in rank order; starts nothing and touches no file.

    `program` is what would follow `python` on a command line: ("train.py", "--flag") or ("-m", "a.module").
    The workers meet in a file of `rendezvous_dir`, which must be new and empty: nothing listens on a port, so
    jobs that start in the same instant cannot meet each other. `launched_at` is in seconds since the epoch.
    `environ` holds variables over those that every worker gets.

    Raises:
        LaunchError: `program` names nothing to run.
    """
    if not program or tuple(program) == ("-m",):
        raise LaunchError("There is nothing to launch: name a script (train.py) or a module (-m package.module).")
    argv = (sys.executable, "-m", "paceline.launch.worker", *program)
    return [
        WorkerCommand(
            argv=argv,
            environ=env.worker_environ(
                env.WorkerFacts(
                    rank=rank,
                    world_size=plan.world_size,
                    local_rank=rank,
                    local_world_size=plan.world_size,
                    init_method=f"file://{rendezvous_dir.absolute()}/store",
                    started_by="paceline",
                ),
                run_dir=run_dir.absolute(),  # a script may change its working directory
                threads_per_worker=plan.threads_per_worker,
                launched_at=launched_at,
            )
            | dict(environ or {}),
            rank=rank,
        )
        for rank in range(plan.world_size)
    ]
