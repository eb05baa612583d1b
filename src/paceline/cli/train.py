"""`paceline train`: one run of a job."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import (
    Algorithm,
    AsJson,
    DataDir,
    DebugComm,
    DryRun,
    JobArgument,
    MaxSteps,
    MicroBatch,
    Quiet,
    Servers,
    Settings,
    Threads,
    Trackers,
)
from paceline.spec import Cluster, Plan
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
from paceline.workflows.forecasts import CLUSTER_FILE, ClusterFile, feed_back, with_forecasts
from paceline.workflows.jobs import resolve_job
from paceline.workflows.plan_file import load_plan
from paceline.workflows.run_folder import execute, new_run_dir, training_program
from paceline.workflows.strategy import PLAIN, Strategy, check_may_shrink, largest_that_fits


@says_where
def train(
    job: JobArgument,
    workers: Annotated[int | None, typer.Option("--workers", "-n", min=1, help="Workers; all devices.")] = None,
    data: DataDir = None,
    max_steps: MaxSteps = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder, where a run that was begun goes on; a new one under runs/.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Go on from a checkpoint of another job.")] = False,
    settings: Settings = None,
    threads: Threads = None,
    micro_batch_size: MicroBatch = None,
    algorithm: Algorithm = "auto",
    servers: Servers = 1,
    track: Trackers = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    where: Where = ANYWHERE,
    elastic: Elastic = RIGID,
    strategy: Strategy = PLAIN,
    debug_comm: DebugComm = False,
    cluster_file: ClusterFile = CLUSTER_FILE,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Of paceline plan; options given here win over it.")
    ] = None,
    show: DryRun = False,
) -> None:
    """Train a job on some workers of this machine, or of several."""
    resolved = resolve_job(job, settings, data)

    planned = None if plan_file is None else load_plan(plan_file)

    def plan_for(cluster: Cluster, num_workers: int) -> Plan:
        plan = strategy.placed(
            resolved,
            cluster,
            num_workers,
            planned,
            threads_per_worker=threads,
            micro_batch_size=micro_batch_size or (planned.micro_batch_size if planned else None),
            algorithm=planned.algorithm if planned and algorithm == "auto" else algorithm,
            num_servers=servers if elastic.min_workers is None else min(servers, num_workers),
        )
        can_spare = elastic.min_workers is not None and num_workers > elastic.min_workers
        exclude_slower = elastic.exclude_slower if can_spare else None
        return with_forecasts(
            resolved, [dataclasses.replace(plan, debug_comm=debug_comm, exclude_slower=exclude_slower)], cluster_file
        )[0]

    def num_workers_on(site: Allocation) -> int:
        num_devices = 1 if site.where.launcher == "debug" else len(site.cluster.devices)
        return workers or (planned.world_size if planned else min(num_devices, resolved.virtual_shards))

    if show:
        site, run_dir = allocation_on_paper(where), (out or Path("runs") / resolved.name).absolute()
        plan = plan_for(site.cluster, num_workers_on(site))
        print(dry_run(plan, training_program(run_dir, max_steps, quiet, track or [], force), run_dir, site.where))
        return
    run_dir = new_run_dir(out, resolved)
    with open_allocation(where, run_dir) as site:
        num_workers = num_workers_on(site)
        limits = elastic.limits(num_workers)
        plan = plan_for(site.cluster, num_workers if limits is None else limits.max_workers)
        run = None
        if limits is not None:
            plan_within = largest_that_fits(plan_for, limits.min_workers)
            check_may_shrink(plan_within, site.cluster, limits.min_workers, limits.max_workers)
            run = functools.partial(site.run_elastic, limits, plan_within, run_dir=run_dir, standby=elastic.standby)
        record = execute(
            resolved,
            plan,
            run_dir,
            site,
            max_steps=max_steps,
            quiet=quiet,
            trackers=track or [],
            force=force,
            run=run,
        )
    feed_back([record], cluster_file)
    if as_json:
        print(json.dumps(record.summary()))
        return
    accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:.2%}, "
    expected = plan.forecast_samples_per_s
    forecast_words = "" if expected is None else f" (forecast {expected:,.0f})"
    print(
        f"{accuracy}{record.samples_per_s:,.0f} samples/s{forecast_words} on {record.world_size} x {plan.device_kind}, "
        f"{record.steps} steps in {record.train_s:.1f} s ({record.wall_s:.1f} s in all)\n"
        f"weights_sha256 {record.weights_sha256}\n{run_dir}/record.json"
    )
