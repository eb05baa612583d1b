"""`paceline.launch`: a user's own script on several workers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from paceline import env
from paceline.errors import LaunchError
from paceline.launch.run import LaunchOptions
from paceline.plan import spread
from paceline.spec import Plan, parse_mesh
from paceline.workflows.arguments import checked
from paceline.workflows.run_folder import new_run_dir
from paceline.workflows.where import HERE, Allocation, Where, allocation_on_paper, open_allocation

TORCHRUN_FLAGS = ("--standalone", "--virtual-local-rank")
TORCHRUN_OPTIONS = (
    *("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--local-addr", "--role"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--monitor-interval", "--shutdown-timeout"),
    *("--numa-binding", "--event-log-handler", "--signals-to-handle"),
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
    torchrun: Sequence[str] = (),
    dry_run: bool = False,
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
        torchrun: further arguments of torchrun, such as ["--rdzv-conf", "timeout=60"].
        dry_run: print what would be started, and start nothing.

    Raises:
        LaunchError: there is no such script, or workers cannot be started.
        JobError: a strategy that does not make as many workers, or arguments that are no list of texts.
        WorkerFailed: a worker failed; says which rank, and why.
    """
    script = str(script)
    check_script(script, is_module=module)
    program = [*(["-m"] if module else []), script, *arguments]
    name = script.rpartition(".")[2] if module else Path(script).stem
    run_dir = Path(out or f"runs/{name}") if dry_run else new_run_dir(out, name)
    options = LaunchOptions(run_dir, "all", max_restarts, env.note(env.STRATEGY, strategy), tuple(torchrun))
    if dry_run:
        allocation = allocation_on_paper(where, run_dir)
        print(allocation.commands(_plan_on(allocation, workers, threads, strategy, debug_comm), program, options))
        return run_dir
    with open_allocation(where, run_dir, None if module else Path(script)) as allocation:
        plan = _plan_on(allocation, workers, threads, strategy, debug_comm)
        allocation.run(plan, program, options)
    return run_dir


def check_script(script: str, *, is_module: bool) -> None:
    """Raise `LaunchError` for a script or module that is not there."""
    if is_module and PathFinder.find_spec(script.partition(".")[0], [str(Path.cwd()), *sys.path]) is None:
        raise LaunchError(f"There is no module '{script}' in this folder or among what is installed.")
    if not is_module and not Path(script).is_file():
        may_be_module = all(part.isidentifier() for part in script.split("."))
        hint = f"; if it is a module, add -m: -m {script}" if may_be_module else ""
        raise LaunchError(f"There is no script '{script}'{hint}.")


def _plan_on(
    allocation: Allocation, workers: int | None, threads: int | None, strategy: str | None, debug_comm: bool
) -> Plan:
    """The plan of as many workers as are asked for, or as there are devices."""
    cluster = allocation.cluster
    num_workers = workers or len(cluster.devices)
    plan = spread(cluster, num_workers, threads)
    if strategy is not None:  # as the script will read it
        parse_mesh(strategy)
        if num_workers > 1:
            plan = spread(cluster, num_workers, threads, parse_mesh(strategy, num_workers, len(plan.placements)))
    return dataclasses.replace(plan, debug_comm=debug_comm)
