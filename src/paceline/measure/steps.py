"""The program that times real steps of a job on the workers of this launch.

    python -m paceline.measure.steps FOLDER

Every worker trains as it would in a run, with the job's own loader, model, sums of gradients and updates; the first one
leaves a `StepsProbe`. Nothing is evaluated and no checkpoint written.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline import data, env, models
from paceline.measure.probe import ANSWER_FILE, REQUEST_FILE, StepsProbe, StepsRequest, TimedSteps
from paceline.object_collectives import broadcast_object
from paceline.spec import Job
from paceline.train.loop import data_facts, training_loss
from paceline.train.meters import WARMUP_STEPS
from paceline.train.optim import build_optimizer
from paceline.train.run import Run, init

_MOST_STEPS = 60
_TENTHS_SIGMAS = 2.563
"""Standard deviations between the 10th and the 90th percentile of a normal quantity."""


def time_jobs(request: StepsRequest) -> StepsProbe:
    """Time the steps of each job in turn; a collective of all workers."""
    timed, num_parameters, num_samples = [], 0, None
    for job in request.jobs:
        with init(job, plan=request.plan, progress=False) as run:
            train_set, _ = data.load(job.data)
            model = models.build(job.model, **data_facts(train_set))
            run.prepare(model, build_optimizer(job.optim, model))
            timed.append(_time_steps(run, job, train_set, request.budget_s / len(request.jobs)))
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
            num_samples = len(train_set) or None
    return StepsProbe(tuple(timed), num_parameters, num_samples)


def _settle(device: torch.device) -> None:
    """Synchronise with the device, so that the clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_steps(run: Run, job: Job, train_set: Any, budget_s: float) -> TimedSteps:
    """Steps until the budget is spent by the first worker's clock, one at least after those that warm up."""
    loss_fn, step_s = training_loss(job.optim), 0.0
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    began, num_wanted = time.perf_counter(), WARMUP_STEPS + 1
    for number, batch in enumerate(run.batches(train_set), 1):
        run.step(batch, loss_fn)
        if number <= WARMUP_STEPS + 1:
            _settle(run.device)
            now = time.perf_counter()
            began, step_s = now, now - began
        if number == WARMUP_STEPS + 1:
            left = min(_MOST_STEPS, int(budget_s / step_s) - number)
            num_wanted = number + broadcast_object(max(0, left), run.world.group)
        if number >= num_wanted:
            break
    _settle(run.device)
    peak_bytes = torch.cuda.max_memory_allocated(run.device) if run.device.type == "cuda" else None
    typical, (low_s, high_s) = run.timer.median(), run.timer.p10_p90()
    return TimedSteps(
        typical.total_s if low_s else step_s,  # of steps that are too long for more than one, to that one's end
        typical.exposed_comm_s if run.world_size > 1 else None,
        typical.data_s,
        math.log(high_s / low_s) / _TENTHS_SIGMAS if low_s and high_s else 0.0,
        peak_bytes,
    )


def main() -> None:
    folder = Path(sys.argv[1])
    found = time_jobs(StepsRequest.load(folder / REQUEST_FILE))
    if env.worker_facts().rank == 0:
        found.save(folder / ANSWER_FILE)


if __name__ == "__main__":
    main()
