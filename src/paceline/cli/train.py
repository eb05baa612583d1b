"""`paceline train`: one run of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.execute import execute, new_run_dir
from paceline.cli.options import (
    Algorithm,
    AsJson,
    DataDir,
    JobArgument,
    MaxSteps,
    MicroBatch,
    Quiet,
    Servers,
    Settings,
    Threads,
    Trackers,
    resolve_job,
)
from paceline.hardware import detect
from paceline.plan import place


def train(
    job: JobArgument,
    workers: Annotated[int | None, typer.Option("--workers", "-n", min=1, help="Workers; all devices.")] = None,
    data: DataDir = None,
    max_steps: MaxSteps = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; a new one under runs/.")] = None,
    settings: Settings = None,
    threads: Threads = None,
    micro_batch_size: MicroBatch = None,
    algorithm: Algorithm = "auto",
    servers: Servers = 1,
    track: Trackers = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a job on some workers of this machine."""
    resolved = resolve_job(job, settings, data)
    cluster = detect()
    num_workers = workers or min(len(cluster.devices), resolved.virtual_shards)
    plan = place(
        resolved,
        cluster,
        num_workers,
        threads_per_worker=threads,
        micro_batch_size=micro_batch_size,
        algorithm=algorithm,
        num_servers=servers,
    )
    run_dir = new_run_dir(out, resolved)
    record = execute(resolved, plan, run_dir, max_steps=max_steps, quiet=quiet, trackers=track or [])
    if as_json:
        print(json.dumps(record.summary()))
        return
    accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:.2%}, "
    print(
        f"{accuracy}{record.samples_per_s:,.0f} samples/s on {record.world_size} x {plan.device_kind}, "
        f"{record.steps} steps in {record.train_s:.1f} s ({record.wall_s:.1f} s in all)\n"
        f"weights_sha256 {record.weights_sha256}\n{run_dir}/record.json"
    )
