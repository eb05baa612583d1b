"""`paceline.probe`: times real steps of a job on 1, 2, … N workers, from which plans are made."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import env
from paceline.errors import ClusterError, file_problems
from paceline.launch.run import LaunchOptions
from paceline.measure.values import REQUEST_FILE, STEPS_FILE, StepsProbe, StepsRequest
from paceline.plan import place, spread
from paceline.regular_files import make_run_folder
from paceline.spec import Cluster, Job, Plan, StepRow
from paceline.spec.cluster import JobTiming
from paceline.spec.job import MOST_SAMPLES, CheckpointSpec
from paceline.words import number_of
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import import_folders, resolve_job
from paceline.workflows.plan import CLUSTER_FILE
from paceline.workflows.where import HERE, Allocation, Where, open_allocation

_SMALLEST_SHARD = 4
"""Shards of fewer samples are not halved: batch norm needs several."""


@checked
def probe(
    job: Job | str | Path,
    *,
    workers: int | None = None,
    out: Path | str = CLUSTER_FILE,
    folder: Path | str = Path("runs"),
    budget: float = 60.0,
    model: str | Callable[..., Any] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
    settings: Sequence[str] = (),
    threads: int | None = None,
    quiet: bool = True,
    where: Where = HERE,
) -> JobTiming:
    """Time steps of a job on 1, 2, 4, … workers, as a run would make them, and write them into a file.

    On one worker steps with virtual shards of half as many samples are timed too.
    Example: `paceline.probe("digits-lenet", budget=10)`.

    Args:
        job: a job, a job file or a recipe.
        workers: the most workers; None: all devices, at most one for each virtual shard.
        out: the file to write; earlier measurements that are not repeated stay in it.
        folder: where workers find their orders, on storage that all nodes see.
        budget: seconds of steps, 1 or more, for all numbers of workers together; starting them comes on top.
        threads: CPU threads that each worker computes with; None: an equal share of the cores.
        quiet: whether progress is left out, which goes to standard error.
        where: the nodes, and how they are reached.
        model, data, settings: as for `train`.

    Returns:
        The timed steps of the job.

    Raises:
        ClusterError: the file cannot be read or written.
        PacelineError: an invalid argument, nodes that cannot be reached, a mistake in the job (see `errors`).
        WorkerFailed: a worker failed.
    """
    resolved, file = resolve_job(job, settings, data, model), Path(out)
    before = Cluster.load(file) if file.exists() else Cluster(())
    with file_problems(f"{out} cannot be written", ClusterError), tempfile.TemporaryFile(dir=file.parent):
        pass  # known before minutes are spent on what could not be kept
    with file_problems(f"The folder {folder} cannot be used"):
        make_run_folder(Path(folder))
        scratch = Path(tempfile.mkdtemp(prefix="probe-", dir=folder)).absolute()
    with open_allocation(where, scratch) as allocation:
        nodes = allocation.cluster.nodes
        most = workers or min(len(allocation.cluster.devices), resolved.virtual_shards)
        threads = threads or spread(allocation.cluster, most).threads_per_worker
        counts = sorted({*(2**power for power in range(most.bit_length())), most})
        plans = [place(resolved, allocation.cluster, count, threads_per_worker=threads) for count in counts]
        timing = _time(resolved, plans, allocation, scratch, budget / len(plans), quiet=quiet)
    shutil.rmtree(scratch, ignore_errors=True)  # it stays where a worker fails, whose report lies there
    by_name = {node.hostname: node for node in (*before.nodes, *nodes)}
    by_job = {(one.job, one.device, one.threads_per_worker): one for one in (*before.timings, timing)}
    with file_problems(f"{out} cannot be written", ClusterError):
        Cluster(tuple(by_name.values()), tuple(by_job.values()), before.checks).save(file)
    return timing


def _time(
    job: Job, plans: Sequence[Plan], allocation: Allocation, scratch: Path, budget_s: float, *, quiet: bool
) -> JobTiming:
    """The steps of the job by the workers of each plan."""
    from rich.console import Console

    from paceline.plan.inputs import job_step  # NumPy: not for those who only want help

    endless = replace(job, epochs=MOST_SAMPLES, checkpoint=CheckpointSpec(), callbacks=())
    halved = replace(endless, virtual_shards=min(2 * job.virtual_shards, job.global_batch_size))
    # The cluster counts GPUs by PCI bus; CUDA's own order puts the fastest first.
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | env.import_note(import_folders(job))
    rows: list[StepRow] = []
    for plan in plans:
        jobs = (endless, halved) if plan.world_size == 1 and job.shard_size >= _SMALLEST_SHARD else (endless,)
        folder = scratch / f"workers{plan.world_size}"
        make_run_folder(folder)
        StepsRequest(jobs, plan, budget_s).save(folder / REQUEST_FILE)
        program = ["-m", "paceline.measure.steps", str(folder / REQUEST_FILE), str(folder)]
        with Console(stderr=True, quiet=quiet).status(f"steps on {number_of(plan.world_size, 'worker')}"):
            allocation.run(plan, program, LaunchOptions(folder, environ=environ))
        found = StepsProbe.load(folder / STEPS_FILE)
        layout = [placement.num_workers for placement in plan.placements]
        for timed_job, timed in zip(jobs, found.timed, strict=True):
            step = job_step(timed_job, layout, found.num_parameters, plan.device_kind == "cuda")
            rows.append(replace(step, **vars(timed)))
    node = allocation.cluster.nodes[0]
    return JobTiming(
        job=job.name,
        device=node.devices[0].name if node.devices[0].kind == plans[0].device_kind else node.cpu_name,
        num_parameters=found.num_parameters,
        threads_per_worker=plans[0].threads_per_worker,
        steps=tuple(rows),
        num_samples=found.num_samples,
        settings=job.timed_settings,
    )
