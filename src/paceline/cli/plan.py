"""`paceline plan`: forecasts a job on 1, 2, … N devices and recommends a number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import table_console
from paceline.cli.options import ARGUMENTS, AsJson, options_of
from paceline.errors import JobError
from paceline.spec import Job
from paceline.spec.plan import PLAN_FILE
from paceline.workflows import plan as workflow
from paceline.workflows.jobs import resolve_job

if TYPE_CHECKING:
    from paceline.workflows.plan import PlannedJob


@options_of(
    workflow.plan,
    cluster={"rich_help_panel": None, "help": "The file that `paceline probe` wrote."},
    devices={
        "metavar": "COUNTS",
        "help": "The device counts, such as 1..64 or 1,2,4 (default: up to all of the cluster).",
    },
    devices_per_node={"metavar": "G"},
    out={"default": Path(), "help": "The folder for plan.json, plan.html and forecast.json."},
)
def plan(
    context: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB", help="A job file or recipe that was probed, or a table of measured steps (*.csv)."
        ),
    ] = None,
    as_json: AsJson = False,
    former: Annotated[str | None, typer.Option("--fit", "--predict", hidden=True)] = None,
    dry_run_mesh: Annotated[
        str | None,
        typer.Option(metavar="MESH", help="Trace the job on a mesh such as 'dp128 x tp8', without its devices."),
    ] = None,
    **options: Any,
) -> None:
    """Forecast step time, throughput, speed-up, time to a target and cost for 1…N devices, and recommend one."""
    if former is not None:
        raise JobError("--fit and --predict are gone: paceline plan ROWS.csv forecasts the rows without a step_time_s.")
    if job is None:
        raise JobError("Name the job to plan for, such as paceline plan job.toml, or a table of measured steps.")
    if dry_run_mesh is None:
        _show(workflow.plan(job, **options), options["out"], as_json=as_json)
        return
    for option in context.command.params:  # whatever else was given has no effect
        source = context.get_parameter_source(str(option.name))
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and option.name not in ARGUMENTS | {"as_json", "dry_run_mesh", "settings", "data"}:
            raise JobError(f"{option.opts[0]} has no effect with --dry-run-mesh: leave it out.")
    resolved = resolve_job(job, options.get("settings"), options.get("data"))
    _show_mesh(resolved, dry_run_mesh, as_json=as_json)


def _show(planned: PlannedJob, out: Path, *, as_json: bool) -> None:
    if as_json:
        plain = None if planned.plan is None else planned.plan.to_mapping()
        print(json.dumps({**planned.forecast.to_mapping(), "plan": plain}))
        return

    from paceline.report.plan_page import plan_table

    console = table_console(pipe_columns=160)
    console.print(plan_table(planned.forecast))
    if planned.forecast.is_fitted:
        pass
    elif planned.plan is None:
        num_devices = planned.forecast.recommended.devices
        print(f"No {PLAN_FILE}: the cluster lacks devices for {num_devices}; probe the nodes they are on.")
    else:
        print(out / PLAN_FILE)
    print(out / workflow.PAGE_FILE)


def _show_mesh(job: Job, mesh: str, *, as_json: bool) -> None:
    """What each worker of a mesh would hold and send."""
    from paceline.workflows.mesh_dry_run import dry_run_mesh as try_mesh

    tried = try_mesh(job, mesh)
    if as_json:
        print(json.dumps(tried.to_mapping()))
    else:
        table_console(pipe_columns=120).print(tried.table())
