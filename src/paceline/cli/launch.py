"""`paceline launch`: a user's own script on several workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from paceline import env
from paceline.cli.options import DebugComm, DryRun, Threads
from paceline.errors import LaunchError
from paceline.launch.run_workers import SAVE_S
from paceline.plan import spread
from paceline.spec import Cluster, Job, Plan, parse_mesh
from paceline.workflows.allocation import (
    ANYWHERE,
    RIGID,
    Allocation,
    Elastic,
    Where,
    allocation_on_paper,
    dry_run,
    open_allocation,
    says_where,
)
from paceline.workflows.run_folder import new_run_dir
from paceline.workflows.strategy import check_may_shrink, largest_that_fits

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


@says_where
def launch(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script that calls paceline.init; its arguments follow.")],
    workers: Annotated[int | None, typer.Option("--workers", "-n", min=1, help="Workers; all devices.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for logs; a new one under runs/.")] = None,
    threads: Threads = None,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME|MESH", help="How workers share the model where the script names no way of its own."),
    ] = None,
    where: Where = ANYWHERE,
    elastic: Elastic = RIGID,
    debug_comm: DebugComm = False,
    show: DryRun = False,
) -> None:
    """Run a script on some workers of this machine, or of several."""
    if not script.is_file():
        raise LaunchError(f"There is no script '{script}'.")
    program = [str(script), *context.args]

    def plan_for(cluster: Cluster, num_workers: int) -> Plan:
        plan = spread(cluster, num_workers, threads)
        if strategy is not None and num_workers > 1:  # as the script will read it
            mesh = parse_mesh(strategy, num_workers, len(plan.placements))
            plan = spread(cluster, num_workers, threads, mesh)
        return dataclasses.replace(plan, debug_comm=debug_comm)

    def num_workers_on(site: Allocation) -> int:
        return workers or (1 if site.where.launcher == "debug" else len(site.cluster.devices))

    if show:
        site = allocation_on_paper(where)
        plan = plan_for(site.cluster, num_workers_on(site))
        print(dry_run(plan, program, out or Path("runs") / script.stem, site.where, env.strategy_note(strategy)))
        return
    run_dir = out or new_run_dir(None, Job(name=script.stem))
    with open_allocation(where, run_dir) as site:
        num_workers = num_workers_on(site)
        limits = elastic.limits(num_workers)
        if limits is None:
            plan = plan_for(site.cluster, num_workers)
            site.run(plan, program, run_dir=run_dir, output="all", environ=env.strategy_note(strategy), save_s=SAVE_S)
        else:
            plan_within = largest_that_fits(plan_for, limits.min_workers)
            check_may_shrink(plan_within, site.cluster, limits.min_workers, limits.max_workers)
            site.run_elastic(
                limits,
                plan_within,
                lambda _plan: program,
                run_dir=run_dir,
                output="all",
                environ=env.strategy_note(strategy),
                standby=elastic.standby,
            )
