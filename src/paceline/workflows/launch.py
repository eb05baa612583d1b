"""`paceline.launch`: a user's own script on several workers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from paceline import env
from paceline.errors import LaunchError
from paceline.launch.run import LaunchOptions
from paceline.plan import spread
from paceline.spec import Plan, parse_mesh
from paceline.workflows.arguments import checked
from paceline.workflows.run_folder import check_folder, new_run_dir
from paceline.workflows.where import HERE, Allocation, Where, allocation_on_paper, open_allocation

TORCHRUN_FLAGS = frozenset({"--standalone", "--virtual-local-rank"})
TORCHRUN_OPTIONS = frozenset(
    f"--{name}"
    for name in (
        *("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "local-addr", "role"),
        *("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "monitor-interval", "shutdown-timeout"),
        *("numa-binding", "event-log-handler", "signals-to-handle"),
    )
)
"""Arguments of torchrun that are passed to it; the others have a name here, as -n, --max-restarts, --out."""


@checked
def launch(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    workers: int | None = None,
    out: Path | str | None = None,
    threads: int | None = None,
    strategy: str | None = None,
    module: bool = False,
    where: Where = HERE,
    max_restarts: int = 0,
    debug_comm: bool = False,
) -> Path:
    """Run a script on several workers and return the folder of its logs.

    The script calls `paceline.init`, or knows nothing of Paceline and calls `torch.distributed.init_process_group` or a
    library that does: its workers find the variables that torchrun sets.

    Example: `paceline.launch("train.py", ["--epochs", "3"], workers=2)`.

    Args:
        script: a Python script, for torchrun or `paceline.init`; `arguments` follow it.
        workers: number of workers; None: one for each device.
        out: the folder for logs; None: a new one under runs/.
        threads: CPU threads that each worker computes with; None: an equal share of the cores.
        strategy: how workers divide the model if the script does not choose it, such as "fsdp" or "dp2 x pp2".
        module: run `script` as a module, as `python -m` does.
        where: the nodes, and how they are reached.
        max_restarts: how often all workers are started again after a failure; the script must resume by itself.
        debug_comm: compare every collective across workers, and turn on NCCL's debug output.

    Raises:
        LaunchError: there is no such script, or workers cannot be started.
        JobError: a strategy that does not make as many workers, or arguments that are no list of texts.
        WorkerFailed: a worker failed; says which rank, and why.
    """
    torchrun, script, arguments = torchrun_arguments(str(script), arguments)
    launching = _Launching(script, arguments, module, workers, threads, strategy, debug_comm)
    run_dir = new_run_dir(out, launching.name)
    with open_allocation(where, run_dir, None if module else Path(script)) as allocation:
        plan = launching.plan_for(allocation)
        options = LaunchOptions(run_dir, "all", max_restarts, launching.notes, tuple(torchrun))
        allocation.run(plan, launching.program, options)
    return run_dir


def launch_commands(
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    out: Path | None = None,
    where: Where = HERE,
    max_restarts: int = 0,
    **spread: Any,
) -> str:
    """The commands that `launch` would start, with the same arguments; starts nothing and opens no connection."""
    torchrun, script, arguments = torchrun_arguments(str(script), arguments)
    launching = _Launching(script, arguments, **spread)
    if out is not None:
        check_folder(out)
    run_dir = out or Path("runs") / launching.name
    allocation = allocation_on_paper(where, run_dir)
    plan = launching.plan_for(allocation)
    options = LaunchOptions(run_dir, "all", max_restarts, launching.notes, tuple(torchrun))
    return allocation.commands(plan, launching.program, options)


def torchrun_arguments(script: str, words: Sequence[str]) -> tuple[list[str], str, Sequence[str]]:
    """(arguments for torchrun, script, its arguments), where torchrun's stand in front of the script."""
    found, words = [], [script, *words]
    while words and words[0].startswith("--"):
        name = words[0].partition("=")[0]
        length = 1 if "=" in words[0] or name in TORCHRUN_FLAGS else 2
        if name not in TORCHRUN_OPTIONS | TORCHRUN_FLAGS:
            raise LaunchError(f"There is no option '{name}'; `paceline launch --help` lists all.")
        found += words[:length]
        words = words[length:]
    if not words:
        raise LaunchError("A script is missing: paceline launch … train.py")
    return found, words[0], words[1:]


def check_script(script: str, *, is_module: bool) -> None:
    """Raises `LaunchError` for an option in place of a script, and for a script or module that is not there."""
    if script.startswith("-"):
        raise LaunchError(f"There is no option '{script}'; `paceline launch --help` lists all.")
    if is_module and PathFinder.find_spec(script.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
        raise LaunchError(f"There is no module '{script}' in this folder or among what is installed.")
    if not is_module and not Path(script).is_file():
        may_be_module = all(part.isidentifier() for part in script.split("."))
        hint = f"; if it is a module, add -m: -m {script}" if may_be_module else ""
        raise LaunchError(f"There is no script '{script}'{hint}.")


@dataclass(frozen=True)
class _Launching:
    """The arguments of `launch` that decide what runs, and how it is spread over workers."""

    script: str
    arguments: Sequence[str] = ()
    module: bool = False
    workers: int | None = None
    threads: int | None = None
    strategy: str | None = None
    debug_comm: bool = False

    def __post_init__(self) -> None:
        check_script(self.script, is_module=self.module)

    @property
    def name(self) -> str:
        """What the run folder is called after."""
        return self.script.rpartition(".")[2] if self.module else Path(self.script).stem

    @property
    def program(self) -> list[str]:
        """What follows `python` on a command line."""
        return [*(["-m"] if self.module else []), self.script, *self.arguments]

    @property
    def notes(self) -> dict[str, str]:
        """The variables that tell the workers what the script leaves open."""
        return env.note(env.STRATEGY, self.strategy)

    def plan_for(self, allocation: Allocation) -> Plan:
        """The plan of as many workers as are asked for, or as there are devices."""
        cluster = allocation.cluster
        num_workers = self.workers or (1 if allocation.where.launcher == "debug" else len(cluster.devices))
        plan = spread(cluster, num_workers, self.threads)
        if self.strategy is not None:  # as the script will read it
            parse_mesh(self.strategy)
            if num_workers > 1:
                mesh = parse_mesh(self.strategy, num_workers, len(plan.placements))
                plan = spread(cluster, num_workers, self.threads, mesh)
        return dataclasses.replace(plan, debug_comm=self.debug_comm)
