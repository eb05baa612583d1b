"""`paceline train`: one run of a job."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from paceline.cli.options import AsJson, DryRun, options_of, to_stderr
from paceline.errors import JobError
from paceline.spec import RunRecord
from paceline.workflows import train as workflow
from paceline.workflows.jobs import resolve_job
from paceline.workflows.run_folder import new_run_dir


@options_of(workflow.train, plan={"help": "The plan.json that `paceline plan` wrote; options given here override it."})
def train(
    as_json: AsJson = False,
    dry_run: DryRun = False,
    **options: Any,
) -> None:
    """Train a job on workers of this machine or of several."""
    options["say"] = to_stderr
    if dry_run and as_json:
        raise JobError("--json says what a run has found, and --dry-run starts none; leave one of them out.")
    if dry_run:
        print(workflow.train_commands(**options))
        return
    job = resolve_job(options.pop("job"), options.pop("settings", ()), options.pop("data", None))
    out = options.pop("out", None)
    run_dir = new_run_dir(out, job.name)
    try:
        record = workflow.train(job, out=run_dir, **options)
    except (KeyboardInterrupt, SystemExit):
        _say_how_to_go_on(run_dir, is_named=out is not None)
        raise
    if not record.is_complete:
        _say_how_to_go_on(run_dir, is_named=out is not None)
    if as_json:
        print(json.dumps(record.summary()))
    else:
        _show(record, run_dir)


def _show(record: RunRecord, run_dir: Path) -> None:
    accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:.2%}, "
    expected = record.plan.forecast_samples_per_s
    forecast = "" if expected is None else f" (forecast {expected:,.0f})"
    print(
        f"{accuracy}{record.samples_per_s:,.0f} samples/s{forecast} on {record.world_size} x "
        f"{record.plan.device_kind}, {record.steps} steps in {record.train_s:.1f} s ({record.wall_s:.1f} s in all)\n"
        f"weights_sha256 {record.weights_sha256}\n{run_dir}/record.json"
    )


def _say_how_to_go_on(run_dir: Path, *, is_named: bool) -> None:
    """Say which command goes on with a run that was interrupted.

    Args:
        is_named: whether the command names the run's folder.
    """
    if (run_dir / "checkpoints" / "latest").exists():
        command = shlex.join(["paceline", *sys.argv[1:], *([] if is_named else ["--out", str(run_dir)])])
        to_stderr(f"To go on: {command}")
