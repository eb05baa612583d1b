"""A job's parts on one device, timed: passes through the model as training makes them, the loader, checkpoints.

    python -m paceline.train.probe FOLDER

FOLDER holds job.json and request.json (a `ProbeRequest`); probe.json (a `JobProbe`) is left there. Checkpoints are
written into FOLDER. Started by `paceline probe`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from paceline import data, models
from paceline.checkpoint import save_weights
from paceline.data.order import epoch_order
from paceline.parallel import Share, StepInput
from paceline.spec import DeviceKind, Job, JobTiming, MicroBatchTiming, Plan
from paceline.spec.codec import above, at_least, from_mapping, to_mapping
from paceline.train.loop import data_facts
from paceline.train.objective import training_loss
from paceline.train.optim import build_optimizer
from paceline.train.progress import Report, bar
from paceline.train.run import LossFn, Run, init
from paceline.train.seeding import seed_shard
from paceline.train.timing import settle

JOB_FILE, REQUEST_FILE, RESULT_FILE = "job.json", "request.json", "probe.json"

_WARMUP_PASSES = 2
_MIN_PASSES = 3
_MAX_PASSES = 15
_SIZE_S = 1.0
"""Enough passes of one size to take so long: medians settle."""
_LOADER_SHARE, _CHECKPOINT_SHARE = 0.15, 0.15
"""Parts of the budget; the rest is the model's."""
_LOADER_S = 5.0
_NUM_CHECKPOINTS = 3


@dataclass(frozen=True)
class ProbeRequest:
    """What to time, besides the job itself."""

    largest_micro_batch_size: int = at_least(1, 1)
    """A worker's share of the global batch."""
    device_kind: DeviceKind = "cpu"
    device: str = ""
    """What the device is called in the result."""
    threads_per_worker: int = at_least(1, 1)
    budget_s: float = above(0, 60.0)


@dataclass(frozen=True)
class JobProbe:
    """What was measured, and a sentence for everything that was not."""

    timing: JobTiming
    not_measured: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(to_mapping(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> JobProbe:
        return from_mapping(cls, json.loads(path.read_text(encoding="utf-8")))


def probe(job: Job, request: ProbeRequest, folder: Path, report: Report = lambda _doing, _done: None) -> JobProbe:
    """Time the parts of `job` on this process's device."""
    # One shard, so that a micro-batch of any size is one pass; peers are what links are timed for.
    alone = job.with_values(
        global_batch_size=request.largest_micro_batch_size,
        virtual_shards=1,
        aggregation={"method": "every_step"},
    )
    plan = Plan(device_kind=request.device_kind, threads_per_worker=request.threads_per_worker)
    with init(alone, plan=plan) as run:
        train_set, _ = data.load(job.data)
        model = models.build(job.model, **data_facts(train_set))
        _, optimizer = run.prepare(model, build_optimizer(job.optim, model))
        reasons: list[str] = []
        began = time.perf_counter()
        report("the loader", 0.0)
        samples_per_s = time_loader(run, train_set, min(_LOADER_S, request.budget_s * _LOADER_SHARE))
        if samples_per_s is None:
            reasons.append("the loader: the training set is a single sample")
        report("checkpoints", _LOADER_SHARE)
        checkpoint_rate = time_checkpoint(run, folder, request.budget_s * _CHECKPOINT_SHARE)
        left_s = request.budget_s - (time.perf_counter() - began)
        timings = time_micro_batches(
            run, train_set, training_loss(job.optim), optimizer, request, left_s, reasons, report
        )
        timing = JobTiming(
            job=job.name,
            device=request.device,
            num_parameters=sum(parameter.numel() for parameter in run.model.parameters()),
            threads_per_worker=request.threads_per_worker,
            micro_batches=tuple(timings),
            largest_micro_batch_size=timings[-1].micro_batch_size if timings else None,
            loader_samples_per_s=samples_per_s,
            checkpoint_bytes_per_s=checkpoint_rate,
        )
    return JobProbe(timing, tuple(reasons))


def sizes_to_time(largest: int) -> list[int]:
    """1, 2, 4, … and `largest` itself."""
    return [*itertools.takewhile(lambda size: size < largest, (2**power for power in itertools.count())), largest]


def time_micro_batches(
    run: Run,
    train_set: Any,
    loss_fn: LossFn,
    optimizer: Optimizer,
    request: ProbeRequest,
    budget_s: float,
    reasons: list[str],
    report: Report,
) -> list[MicroBatchTiming]:
    """Median seconds of a forward and backward pass, size by size, until one does not fit into memory or budget.

    The smallest size is timed in any case, if memory has room for it. Why a size was left out is added to `reasons`.
    """
    began = time.perf_counter()
    timings: list[MicroBatchTiming] = []
    for size in sizes_to_time(request.largest_micro_batch_size):
        spent_s = time.perf_counter() - began
        what = f"micro-batches of {size} and more"
        if timings:
            last = timings[-1]
            forecast_s = last.seconds * size / last.micro_batch_size
            if spent_s + forecast_s * (_WARMUP_PASSES + _MIN_PASSES) > budget_s:
                reasons.append(f"{what}: at about {forecast_s:.2g} s a pass they exceed {request.budget_s:g} s for all")
                break
            if run.device.type == "cpu" and (missing := _missing_bytes(size / last.micro_batch_size)) > 0:
                reasons.append(f"{what}: memory lacks about {missing / 2**30:.1f} GiB")
                break
        report(f"micro-batches of {size}", _LOADER_SHARE + _CHECKPOINT_SHARE + spent_s / request.budget_s)
        try:
            timings.append(_time_size(run, train_set, loss_fn, optimizer, size, budget_s - spent_s))
        except ValueError as problem:  # batch norm has nothing to normalise over
            if "more than 1 value per channel" not in str(problem):
                raise
            reasons.append(f"micro-batches of {size}: the model's batch norm needs more samples")
        except RuntimeError as problem:
            if not is_out_of_memory(problem):
                raise
            optimizer.zero_grad(set_to_none=True)
            reasons.append(f"{what}: out of memory")
            break
    return timings


def is_out_of_memory(problem: RuntimeError) -> bool:
    """Whether a GPU, or the CPU's allocator, has no more."""
    return isinstance(problem, torch.OutOfMemoryError) or "can't allocate memory" in str(problem)


def _missing_bytes(growth: float) -> float:
    """What this node's memory lacks for a pass `growth` times as large as the largest until now; 0 or less: nothing.

    A process that the kernel kills for want of memory leaves no measurement at all.
    """
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0
    free_bytes = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    return 0.0 if free_bytes is None else peak_bytes * (growth - 1) - free_bytes


def _time_size(
    run: Run, train_set: Any, loss_fn: LossFn, optimizer: Optimizer, size: int, budget_s: float
) -> MicroBatchTiming:
    on_gpu = run.device.type == "cuda"
    (batch,) = run.read(train_set, 0, [_first_samples(train_set, size)], train=True)
    step = StepInput(
        share=Share.of(size, 1, 0, 1),
        batch=batch,
        loss_of=lambda model, part: run.loss_of(model, part, loss_fn),
        seed_shard=lambda shard: seed_shard(run.job.seed, 0, shard, run.device),
        scale=lambda loss: loss,
    )
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(run.device)
    times: list[float] = []
    began = time.perf_counter()
    while not _is_enough(times, time.perf_counter() - began, budget_s):
        optimizer.zero_grad(set_to_none=True)
        settle(run.device)
        pass_began = time.perf_counter()
        run.engine.gradients(step)
        settle(run.device)
        times.append(time.perf_counter() - pass_began)
    return MicroBatchTiming(
        size,
        statistics.median(times[_WARMUP_PASSES:]),
        torch.cuda.max_memory_allocated(run.device) if on_gpu else None,
    )


def _is_enough(times: Sequence[float], spent_s: float, budget_s: float) -> bool:
    counted = len(times) - _WARMUP_PASSES
    return counted >= _MIN_PASSES and (counted >= _MAX_PASSES or spent_s > min(_SIZE_S, budget_s))


def _first_samples(train_set: Any, size: int) -> Any:
    """The numbers of `size` samples; a set with fewer gives some twice."""
    return np.resize(epoch_order(len(train_set), len(train_set), 0, 0).indices, size)


def time_loader(run: Run, train_set: Any, limit_s: float) -> float | None:
    """Samples a second that arrive on the device, augmented, after the first batch; None for a set of one batch."""
    order = epoch_order(len(train_set), min(run.job.global_batch_size, max(1, len(train_set) // 2)), 0, 0)
    batches = run.read(train_set, 0, [order.batch(number) for number in range(order.num_batches)], train=True)
    if order.num_batches < 2:
        return None
    next(batches)  # starts processes, fills caches
    settle(run.device)
    began = time.perf_counter()
    num_samples = 0
    for number, _ in enumerate(batches, 1):
        num_samples += len(order.batch(number))
        if time.perf_counter() - began > limit_s:
            break
    settle(run.device)
    return num_samples / (time.perf_counter() - began)


def time_checkpoint(run: Run, folder: Path, limit_s: float) -> float:
    """Bytes a second that are safely on the disk of `folder`: written as a run writes its weights, then fsync."""
    path = folder / "probe.safetensors"
    rates: list[float] = []
    began = time.perf_counter()
    try:
        while not rates or (len(rates) < _NUM_CHECKPOINTS and time.perf_counter() - began < limit_s):
            written_at = time.perf_counter()
            save_weights(run.model, path)
            for place in (path, folder):
                descriptor = os.open(place, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            rates.append(path.stat().st_size / (time.perf_counter() - written_at))
    finally:
        path.unlink(missing_ok=True)
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.train.probe", description=__doc__)
    parser.add_argument("folder", type=Path, help="with job.json and request.json; probe.json is left there")
    parser.add_argument("--quiet", action="store_true", help="say nothing")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    job = Job.from_mapping(json.loads((folder / JOB_FILE).read_text(encoding="utf-8")))
    request = from_mapping(ProbeRequest, json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8")))
    with bar("the job's data and model", is_shown=not arguments.quiet) as report:
        result = probe(job, request, folder, report)
    result.save(folder / RESULT_FILE)


if __name__ == "__main__":
    main()
