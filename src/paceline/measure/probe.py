"""Times a job's steps: the request to the program that runs them, its answer, and the rows for the step model.

Loads no torch: only the program in `steps` does, and a trace of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ClusterError, reason_of
from paceline.files import make_run_folder
from paceline.spec import Cluster, Job, Node, Plan, RunRecord, StepRow
from paceline.spec.cluster import JobTiming
from paceline.spec.codec import JsonValue, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from paceline.spec.forecast import ModelCost
from paceline.spec.job import MOST_SAMPLES, CheckpointSpec

CLUSTER_FILE = Path("cluster.json")
"""What was measured in this folder, and the errors of forecasts from it."""
REQUEST_FILE, ANSWER_FILE = "request.json", "steps.json"
"""Files in the folder of a launch: the request that all workers read, and the answer that the first one writes."""
_SMALLEST_SHARD = 4
"""Shards of fewer samples are not halved: batch norm needs several."""
RunProgram = Callable[[Plan, Sequence[str], Path], None]
"""(plan, what would follow `python` on a command line, folder for the logs): runs the program on the plan's workers."""
RowOf = Callable[[Job, Sequence[int], int, bool], StepRow]
"""(job, workers on each node, number of parameters, whether they have GPUs) -> a step of the job, without times."""


@dataclass(frozen=True)
class StepsRequest(JsonValue):
    """The jobs whose steps are timed, one after the other, by the workers of a plan."""

    jobs: tuple[Job, ...]
    plan: Plan
    budget_s: PositiveFloat = 60.0
    """Seconds of steps, for all jobs together."""


@dataclass(frozen=True)
class TimedSteps:
    """The median step of a job, on the first worker. The fields are those of a `StepRow`."""

    step_time_s: PositiveFloat
    sync_time_s: NonNegativeFloat | None = None
    loading_s: NonNegativeFloat | None = None
    spread: NonNegativeFloat = 0.0
    peak_memory_bytes: NonNegativeInt | None = None


@dataclass(frozen=True)
class StepsProbe(JsonValue):
    """The answer: what was timed, and facts about the job."""

    timed: tuple[TimedSteps, ...]
    """The steps of each job of the request, in its order."""
    num_parameters: NonNegativeInt
    num_samples: PositiveInt | None = None
    """Samples of the training set; None: not known."""


def time_job(
    job: Job, plans: Sequence[Plan], device: str, folder: Path, budget_s: float, run: RunProgram, row_of: RowOf
) -> JobTiming:
    """Time a job's steps on the workers of each plan, and on one worker also with virtual shards of half as many
    samples: that tells the time of a pass from the time of its samples.

    Args:
        device: what the workers compute on, in words.
        folder: where the requests and answers of all plans are kept.
        budget_s: seconds of steps, for all plans together.
    """
    endless = replace(job, epochs=MOST_SAMPLES, checkpoint=CheckpointSpec(), callbacks=())
    halved = replace(endless, virtual_shards=min(2 * job.virtual_shards, job.global_batch_size))
    rows: list[StepRow] = []
    for plan in plans:
        is_halved = plan.world_size == 1 and job.shard_size >= _SMALLEST_SHARD
        request = StepsRequest((endless, halved) if is_halved else (endless,), plan, budget_s / len(plans))
        of_launch = folder / f"workers{plan.world_size}"
        make_run_folder(of_launch)
        request.save(of_launch / REQUEST_FILE)
        run(plan, ["-m", "paceline.measure.steps", str(of_launch)], of_launch)
        found = StepsProbe.load(of_launch / ANSWER_FILE)
        layout, has_gpus = [one.num_workers for one in plan.placements], plan.device_kind == "cuda"
        for timed_job, timed in zip(request.jobs, found.timed, strict=True):
            rows.append(replace(row_of(timed_job, layout, found.num_parameters, has_gpus), **vars(timed)))
    return JobTiming(
        job=job.name,
        device=device,
        num_parameters=found.num_parameters,
        threads_per_worker=plans[0].threads_per_worker,
        steps=tuple(rows),
        num_samples=found.num_samples,
        settings=job.timed_settings,
    )


def save_timing(timing: JobTiming, nodes: Iterable[Node], before: Cluster, file: Path) -> None:
    """Write what was measured into a file, with what was measured `before` of other nodes and jobs."""
    by_name = {node.hostname: node for node in (*before.nodes, *nodes)}
    by_job = {(one.job, one.device, one.threads_per_worker): one for one in (*before.timings, timing)}
    Cluster(tuple(by_name.values()), tuple(by_job.values()), before.forecast_errors).save(file)


def note_forecast_error(record: RunRecord) -> None:
    """Note the error of a run's forecast, if it had one, in cluster.json, where the latest 50 are kept."""
    forecast = record.plan.forecast_samples_per_s
    if not forecast or not record.samples_per_s:
        return
    try:
        cluster = Cluster.load(CLUSTER_FILE)
        errors = (*cluster.forecast_errors, forecast / record.samples_per_s - 1)
        replace(cluster, forecast_errors=errors[-50:]).save(CLUSTER_FILE)
    except (OSError, ClusterError) as problem:  # the run is good nevertheless
        print(f"paceline: no forecast error noted in {CLUSTER_FILE}: {reason_of(problem)}", file=sys.stderr)


def trace_job(job: Job) -> ModelCost:
    """The layers of the job's model, with their arithmetic and memory. Loads torch, and no memory for the model."""
    from paceline.data import load
    from paceline.models import build
    from paceline.parallel.layer_costs import trace_model
    from paceline.train.loop import as_pair, data_facts

    if (here := str(Path.cwd())) not in sys.path:  # where workers, which `python -m` starts, find modules of the user
        sys.path.insert(0, here)
    train_set, _ = load(job.data)
    return trace_model(lambda: build(job.model, **data_facts(train_set)), as_pair(train_set[0])[0])
