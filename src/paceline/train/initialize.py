"""`paceline.init`: makes a `Run` from a job and the environment that the launcher set."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from paceline import env
from paceline.errors import JobError
from paceline.spec import Job, Plan, parse_mesh
from paceline.spec.mesh_name import check_strategy
from paceline.spec.plan import RunLimit
from paceline.train.process.watch import tell_failures
from paceline.train.records.progress import Progress
from paceline.train.run import Run


def init(
    job: Job | None = None,
    /,
    *,
    plan: Plan | None = None,
    strategy: str | None = None,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    checkpoint_dir: str | Path | None = None,
    force: bool = False,
    progress: bool | TextIO = True,
    **values: Any,
) -> Run:
    """Join the other workers of this run; their number is set by the launcher of this script.

    Args:
        job: what to train; None: the defaults.
        plan: how the job is spread over workers; None: one worker for each process of this launch, on GPUs if there
            are any.
        strategy: how the model is spread over the workers without a plan: "dp", "fsdp", "hsdp", "pp", "tp", or a
            mesh such as "fsdp2 x tp2"; None: as `paceline launch --strategy` says, else "dp". It has no effect on one
            worker alone.
        max_steps: end `Run.batches` after this many steps, whatever the epochs say.
        max_minutes: save a checkpoint and end `Run.batches` this many minutes after the launch; the same command,
            run again, resumes.
        checkpoint_dir: the folder of checkpoints if the job names none; None: no checkpoints are written.
        force: resume even a checkpoint of another job.
        progress: whether rank 0 shows the progress of the run on standard error: in a terminal one line that is
            updated in place, else a new line now and then; or the stream to write to.
        values: keys of a job, which replace those of `job`: `global_batch_size=256, optim={"clip_norm": 1.0}`. The
            schedule in `optim` acts as a factor on the learning rates of the optimizer that `prepare` is given.

    Raises:
        JobError: an unknown key, an invalid value, or more workers than virtual shards.
        LaunchError: an environment that contradicts itself.
    """
    facts = env.worker_facts()
    tell_failures(facts)
    _check_belong_to_job(values)
    job = (job or Job()).with_values(**values)
    strategy = strategy or env.text(env.STRATEGY) or "dp"
    check_strategy(strategy)
    # A Plan made in Python is checked here too.
    plan = Plan.from_mapping(plan.to_mapping()) if plan else _default_plan(job, facts, strategy)
    limits = [limit for limit in (max_steps, env.number(env.MAX_STEPS)) if limit is not None]
    plan = dataclasses.replace(plan, world_size=facts.world_size)
    if plan.mesh is not None and plan.mesh.num_workers != facts.world_size:
        raise JobError(
            f"The plan lays out {plan.mesh.num_workers} workers as {plan.mesh}, but {facts.world_size} were started; "
            "start as many, or leave the plan's mesh out."
        )
    address = job.checkpoint.dir or checkpoint_dir
    stream = sys.stderr if isinstance(progress, bool) else progress
    return Run(
        job,
        plan,
        facts,
        min(limits, default=None),
        None if address is None else str(address),
        force=force,
        max_minutes=RunLimit.from_mapping({"max_minutes": max_minutes}).max_minutes,
        display=Progress(stream, is_shown=progress is not False) if facts.rank == 0 else None,
    )


def _check_belong_to_job(values: Mapping[str, Any]) -> None:
    """Raises `JobError` for a value that a method of the run takes, and no job has."""
    keys = {field.name for field in dataclasses.fields(Job)}
    for method in (Run.prepare, Run.batches, Run.step, Run.evaluate):
        for name in values.keys() & inspect.signature(method).parameters.keys() - keys:
            raise JobError(f"'{name}' is no key of a job: give it to run.{method.__name__}(…, {name}=…).")


def _default_plan(job: Job, facts: env.WorkerFacts, strategy: str) -> Plan:
    kind = env.device_kind() or ("cuda" if torch.cuda.is_available() else "cpu")
    threads = env.thread_limit() or max(1, torch.get_num_threads() // facts.local_world_size)
    num_nodes = max(1, facts.world_size // facts.local_world_size)
    return Plan(
        world_size=facts.world_size,
        device_kind="cuda" if kind == "cuda" else "cpu",
        # How a kernel splits its sums among threads may change their last bits.
        threads_per_worker=1 if job.parity == "bitwise" else threads,
        algorithm="tree_exact" if job.parity == "bitwise" else "auto",
        mesh=parse_mesh(strategy, facts.world_size, num_nodes) if facts.world_size > 1 else None,
        debug_comm=bool(env.text(env.DEBUG_COMM)),
    )
