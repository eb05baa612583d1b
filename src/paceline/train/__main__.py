"""The program of one worker: `python -m paceline.train RUN_DIR`; job, plan and limit are files in that folder."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from paceline import env
from paceline.files import make_run_folder
from paceline.spec import Job, Plan
from paceline.spec.job import JOB_FILE
from paceline.spec.plan import LIMIT_FILE, PLAN_FILE, RunLimit
from paceline.train.loop import RunOutput, train
from paceline.train.peers import tell_failures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.train", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="folder with job.json, plan.json and, for a limit, limit.json")
    parser.add_argument("--quiet", action="store_true", help="say nothing")
    parser.add_argument("--track", action="append", default=[], help="also log to tensorboard, wandb or mlflow")
    parser.add_argument("--force", action="store_true", help="resume even a checkpoint of another job")
    parser.add_argument("--job", help="the job itself, as JSON, for a folder without job.json")
    parser.add_argument("--plan", help="the plan itself, as JSON")
    arguments = parser.parse_args()
    tell_failures(env.worker_facts())
    run_dir: Path = arguments.run_dir
    make_run_folder(run_dir)
    job = Job.from_mapping(json.loads(arguments.job)) if arguments.job else Job.load(run_dir / JOB_FILE)
    plan = Plan.from_mapping(json.loads(arguments.plan)) if arguments.plan else Plan.load(run_dir / PLAN_FILE)
    limit = run_dir / LIMIT_FILE
    is_limited = arguments.job is None and limit.exists()
    limits = RunLimit.load(limit) if is_limited else RunLimit()
    output = RunOutput(run_dir, None if arguments.quiet else sys.stderr, arguments.track)
    train(job, plan, output, limits.max_steps, max_minutes=limits.max_minutes, force=arguments.force)


if __name__ == "__main__":
    main()
