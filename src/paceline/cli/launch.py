"""`paceline launch`: a user's own script on several workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.execute import new_run_dir
from paceline.cli.options import DebugComm, Threads
from paceline.cli.site import HangTimeout, Hosts, HostsFile, Interface, Launcher, dry_run, open_site
from paceline.errors import LaunchError
from paceline.launch.run import HANG_TIMEOUT_S
from paceline.plan import spread
from paceline.spec import Job

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script that calls paceline.init; its arguments follow.")],
    workers: Annotated[int | None, typer.Option("--workers", "-n", min=1, help="Workers; all devices.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for logs; a new one under runs/.")] = None,
    threads: Threads = None,
    launcher: Launcher = "auto",
    hosts: Hosts = None,
    hosts_file: HostsFile = None,
    interface: Interface = None,
    hang_timeout: HangTimeout = HANG_TIMEOUT_S,
    debug_comm: DebugComm = False,
    show: Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")] = False,
) -> None:
    """Run a script on some workers of this machine, or of several."""
    if not script.is_file():
        raise LaunchError(f"There is no script '{script}'.")
    with open_site(launcher, hosts, hosts_file, interface, hang_timeout, on_paper=show) as site:
        count = workers or (1 if site.launcher == "debug" else len(site.cluster.devices))
        plan = dataclasses.replace(spread(site.cluster, count, threads), debug_comm=debug_comm)
        program = [str(script), *context.args]
        if show:
            print(dry_run(plan, program, out or Path("runs") / script.stem, site.launcher))
            return
        run_dir = out or new_run_dir(None, Job(name=script.stem))
        site.run(plan, program, run_dir=run_dir, output="all")
