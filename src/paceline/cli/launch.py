"""`paceline launch`: a user's own script on several workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.execute import new_run_dir
from paceline.cli.options import DebugComm, DryRun, Threads
from paceline.cli.site import ANYWHERE, Site, Where, dry_run, open_site, says_where, site_on_paper
from paceline.errors import LaunchError
from paceline.plan import spread
from paceline.spec import Job, Plan

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


@says_where
def launch(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script that calls paceline.init; its arguments follow.")],
    workers: Annotated[int | None, typer.Option("--workers", "-n", min=1, help="Workers; all devices.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for logs; a new one under runs/.")] = None,
    threads: Threads = None,
    where: Where = ANYWHERE,
    debug_comm: DebugComm = False,
    show: DryRun = False,
) -> None:
    """Run a script on some workers of this machine, or of several."""
    if not script.is_file():
        raise LaunchError(f"There is no script '{script}'.")
    program = [str(script), *context.args]

    def plan_for(site: Site) -> Plan:
        count = workers or (1 if site.where.launcher == "debug" else len(site.cluster.devices))
        return dataclasses.replace(spread(site.cluster, count, threads), debug_comm=debug_comm)

    if show:
        site = site_on_paper(where)
        print(dry_run(plan_for(site), program, out or Path("runs") / script.stem, site.where))
        return
    run_dir = out or new_run_dir(None, Job(name=script.stem))
    with open_site(where, run_dir) as site:
        site.run(plan_for(site), program, run_dir=run_dir, output="all")
