"""`paceline.probe`: times real steps of a job on 1, 2, … N workers, from which plans are made."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import env
from paceline.errors import ClusterError, WorkerFailed, file_problems
from paceline.measure.values import STEPS_FILE, StepsProbe, StepsRequest
from paceline.plan import place, spread
from paceline.regular_files import make_run_folder
from paceline.spec import CheckpointSpec, Cluster, Job, JobTiming, Plan, StepRow
from paceline.spec.job import MOST_SAMPLES
from paceline.words import number_of
from paceline.workflows.allocation import Allocation, open_allocation
from paceline.workflows.arguments import checked
from paceline.workflows.forecasts import CLUSTER_FILE
from paceline.workflows.jobs import check_amounts, check_counts, import_folders, resolve_job
from paceline.workflows.where import HERE, Where

_PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The order in which the cluster counts GPUs; CUDA's own puts the fastest first."""
_SMALLEST_SHARD = 4
"""Shards of fewer samples are not halved: batch norm needs several."""


@dataclass(frozen=True)
class ProbeResult:
    """What was measured, and the file that it is in."""

    measured: Cluster
    file: Path

    @property
    def timing(self) -> JobTiming:
        """The timed steps of the job."""
        return self.measured.timings[0]


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
) -> ProbeResult:
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

    Raises:
        ClusterError: the file cannot be read or written.
        PacelineError: an invalid argument, nodes that cannot be reached, a mistake in the job (see `errors`).
        WorkerFailed: a worker failed.
    """
    check_counts(workers=workers, threads=threads)
    check_amounts(budget=budget)
    resolved, file = resolve_job(job, settings, data, model), Path(out)
    before = Cluster.load(file) if file.exists() else None
    with file_problems(f"{out} cannot be written", ClusterError), tempfile.TemporaryFile(dir=file.parent):
        pass  # known before minutes are spent on what could not be kept
    with _scratch(Path(folder)) as scratch, open_allocation(where, scratch) as allocation:
        cluster = allocation.cluster
        most = workers or min(len(cluster.devices), resolved.virtual_shards)
        threads = threads or spread(cluster, most).threads_per_worker
        plans = [place(resolved, cluster, count, threads_per_worker=threads) for count in _counts(most)]
        timing = _time(resolved, plans, allocation, scratch, budget / len(plans), quiet=quiet)
    measured = Cluster(cluster.nodes, (timing,))
    with file_problems(f"{out} cannot be written", ClusterError):
        merge(before, measured).save(file)
    return ProbeResult(measured, file)


def merge(before: Cluster | None, measured: Cluster) -> Cluster:
    """`before` with the nodes and timings of `measured` in place of its own; its forecast checks stay."""
    if before is None:
        return measured
    nodes = {node.hostname: node for node in (*before.nodes, *measured.nodes)}
    timings = {
        (timing.job, timing.device, timing.threads_per_worker): timing
        for timing in (*before.timings, *measured.timings)
    }
    return Cluster(tuple(nodes.values()), tuple(timings.values()), before.checks)


def _counts(most: int) -> list[int]:
    """1, 2, 4, … and `most` itself."""
    return sorted({*(2**power for power in range(most.bit_length())), most})


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A temporary folder; it stays if a worker fails, whose report lies there."""
    with file_problems(f"The folder {folder} cannot be used"):
        make_run_folder(folder)
        scratch = Path(tempfile.mkdtemp(prefix="probe-", dir=folder)).absolute()
    with ExitStack() as at_end:
        at_end.callback(shutil.rmtree, scratch, ignore_errors=True)
        try:
            yield scratch
        except WorkerFailed:
            at_end.pop_all()
            raise


def _time(
    job: Job, plans: Sequence[Plan], allocation: Allocation, scratch: Path, budget_s: float, *, quiet: bool
) -> JobTiming:
    """The steps of the job by the workers of each plan."""
    from rich.console import Console

    from paceline.plan.inputs import job_step  # NumPy: not for those who only want help

    endless = dataclasses.replace(job, epochs=MOST_SAMPLES, checkpoint=CheckpointSpec(), callbacks=())
    halved = dataclasses.replace(endless, virtual_shards=min(2 * job.virtual_shards, job.global_batch_size))
    node, imports = allocation.cluster.nodes[0], env.import_note(import_folders(job))
    rows: list[StepRow] = []
    for plan in plans:
        jobs = (endless, halved) if plan.world_size == 1 and job.shard_size >= _SMALLEST_SHARD else (endless,)
        where = scratch / f"workers{plan.world_size}"
        with Console(stderr=True, quiet=quiet).status(f"steps on {number_of(plan.world_size, 'worker')}"):
            allocation.measure("steps", StepsRequest(jobs, plan, budget_s), plan, where, _PCI_ORDER | imports)
        found = StepsProbe.load(where / STEPS_FILE)
        layout = [placement.num_workers for placement in plan.placements]
        for timed_job, timed in zip(jobs, found.timed, strict=True):
            step = job_step(timed_job, layout, found.num_parameters, plan.device_kind == "cuda")
            rows.append(replace(step, **vars(timed)))
    device = node.devices[0]
    return JobTiming(
        job=job.name,
        device=device.name if device.kind == plans[0].device_kind else node.cpu_name,
        num_parameters=found.num_parameters,
        threads_per_worker=plans[0].threads_per_worker,
        steps=tuple(rows),
        num_samples=found.num_samples,
        settings=job.timed_settings,
    )
