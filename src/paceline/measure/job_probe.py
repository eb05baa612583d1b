"""A job's parts on one device, timed: passes through the model as training makes them, the loader, checkpoints.

    python -m paceline.measure.job_probe FOLDER

FOLDER holds job.json and request.json (a `ProbeRequest`); probe.json (a `JobProbe`) is left there. Checkpoints are
written into FOLDER. Started by `paceline probe`: the first worker is timed alone, while the others wait for a file in
FOLDER; then all compute at the same time, because the workers of a node share memory, caches and power.
"""

from __future__ import annotations

import argparse
import dataclasses
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

import torch

from paceline import data, env, models
from paceline.checkpoint import save_weights
from paceline.data import ArraySet
from paceline.data.order import epoch_order
from paceline.measure.steps import StepTiming, Subject, num_passes, time_steps
from paceline.measure.workers_together import Together, time_together
from paceline.spec import DeviceKind, Job, JobTiming, MicroBatchTiming, Plan, SumTiming
from paceline.spec.codec import above, at_least, from_mapping, to_mapping
from paceline.train.loop import data_facts
from paceline.train.objective import training_loss
from paceline.train.optim import build_optimizer
from paceline.train.process_group import join
from paceline.train.progress import Report, bar
from paceline.train.run import Run
from paceline.train.timing import settle

JOB_FILE, REQUEST_FILE, RESULT_FILE = "job.json", "request.json", "probe.json"
TOGETHER_FILE = "together.json"
"""Tells the workers that wait how many samples all of them are to compute, and for how long."""

_LOADER_SHARE, _CHECKPOINT_SHARE, _TOGETHER_SHARE = 0.1, 0.1, 0.4
"""Parts of the budget; the rest is for passes on one worker."""
_LOADER_S = 5.0
_NUM_CHECKPOINTS = 3
_LOOK_S = 0.05
"""How often a worker that waits looks for the file."""


@dataclass(frozen=True)
class ProbeRequest:
    """What to time, besides the job itself."""

    largest_micro_batch_size: int = at_least(1, 1)
    """The largest pass that training makes: that of one worker alone."""
    micro_batch_size: int = at_least(1, 1)
    """The largest pass with all workers of the plan."""
    shard_size: int = at_least(1, 1)
    """Samples of a virtual shard, over which batch norm normalises."""
    workers_on_node: int = at_least(1, 1)
    """Of the fullest node, with all workers of the plan."""
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


def probe(
    job: Job, request: ProbeRequest, folder: Path, report: Report = lambda _doing, _done: None
) -> JobProbe | None:
    """Time the parts of `job` on this process's device; None on workers that were there to compute beside the first."""
    facts = env.worker_facts()
    # Each computes as if alone, and as one shard or several: peers are what links are timed for.
    apart = job.with_values(
        global_batch_size=request.largest_micro_batch_size,
        virtual_shards=1,
        aggregation={"method": "every_step"},
    )
    plan = Plan(
        world_size=facts.world_size, device_kind=request.device_kind, threads_per_worker=request.threads_per_worker
    )
    with Run(apart, plan, dataclasses.replace(facts, rank=0, world_size=1, local_world_size=1)) as run:
        train_set, _ = data.load(job.data)
        model = models.build(job.model, **data_facts(train_set))
        _, optimizer = run.prepare(model, build_optimizer(job.optim, model))
        for group in optimizer.param_groups:  # weights stay usual numbers, however often they are updated
            group["lr"] = 0.0
        subject = Subject(run, train_set, training_loss(job.optim), optimizer, request.shard_size)
        if facts.rank > 0:
            wanted = _wait_for_orders(folder / TOGETHER_FILE)
            if wanted.micro_batch_size:
                time_together(subject, join(facts, plan), job, plan, wanted)
            return None
        return _probe_first(subject, job, request, facts, plan, folder, report)


def _probe_first(
    subject: Subject,
    job: Job,
    request: ProbeRequest,
    facts: env.WorkerFacts,
    plan: Plan,
    folder: Path,
    report: Report,
) -> JobProbe:
    """On the first worker: all that it does alone, then what it does beside the others."""
    run, train_set = subject.run, subject.train_set
    reasons: list[str] = []
    began = time.perf_counter()
    report("the loader", 0.0)
    samples_per_s = time_loader(run, train_set, min(_LOADER_S, request.budget_s * _LOADER_SHARE))
    if samples_per_s is None:
        reasons.append("the loader: the training set is a single sample")
    report("checkpoints", _LOADER_SHARE)
    checkpoint_rate = time_checkpoint(run, folder, request.budget_s * _CHECKPOINT_SHARE)
    left_s = request.budget_s - (time.perf_counter() - began)
    kept_s = request.budget_s * _TOGETHER_SHARE if facts.world_size > 1 else 0.0
    timings, peaks = time_micro_batches(subject, request, left_s - kept_s, reasons, report)

    left_s = request.budget_s - (time.perf_counter() - began)
    report("the optimizer", 1.0 - _TOGETHER_SHARE)
    step = _time_step(subject, request, timings, left_s, reasons)
    together = Together()
    if step is not None and facts.world_size > 1:
        left_s = request.budget_s - (time.perf_counter() - began)
        together = _what_fits(step, peaks[step.micro_batch_size], request, facts, left_s, reasons)
    _give_orders(together, folder / TOGETHER_FILE)
    slowdown = 1.0
    sums: tuple[SumTiming, ...] = ()
    if step is not None and together.micro_batch_size:
        report(f"{facts.world_size} workers at the same time", 1.0 - _TOGETHER_SHARE)
        timed = time_together(subject, join(facts, plan), job, plan, together)
        slowdown, sums = timed.step_s / step.seconds, timed.sums
    timing = JobTiming(
        job=run.job.name,
        device=request.device,
        num_parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        threads_per_worker=request.threads_per_worker,
        micro_batches=tuple(timings),
        largest_micro_batch_size=timings[-1].micro_batch_size if timings else None,
        loader_samples_per_s=samples_per_s,
        checkpoint_bytes_per_s=checkpoint_rate,
        loads_between_passes=_loads_between_passes(run, train_set),
        update_s=None if step is None else step.update_s,
        workers_together=facts.world_size if together.micro_batch_size else 1,
        workers_together_on_node=request.workers_on_node if together.micro_batch_size else 1,
        together_micro_batch_size=together.micro_batch_size,
        together_slowdown=slowdown,
        sums=sums,
    )
    return JobProbe(timing, tuple(reasons))


def _loads_between_passes(run: Run, train_set: Any) -> bool:
    """On a CPU nobody else makes batches, unless there are processes for it."""
    has_processes = run.job.data.loader_workers > 0 and not isinstance(train_set, ArraySet)
    return run.device.type == "cpu" and not has_processes


def sizes_to_time(largest: int, *others: int) -> list[int]:
    """1, 2, 4, … and `largest` itself, with the others among them."""
    powers = itertools.takewhile(lambda size: size < largest, (2**power for power in itertools.count()))
    return sorted({*powers, *(size for size in others if size < largest), largest})


# --- passes and updates of one worker ---


def time_micro_batches(
    subject: Subject, request: ProbeRequest, budget_s: float, reasons: list[str], report: Report
) -> tuple[list[MicroBatchTiming], dict[int, float]]:
    """Median seconds of a forward and backward pass, size by size, until one does not fit into memory or budget.

    The smallest size is timed in any case, if memory has room for it. Why a size was left out is added to `reasons`.

    Returns:
        The timings, and by size the bytes that this process had held at most until then.
    """
    began = time.perf_counter()
    on_cpu = subject.run.device.type == "cpu"
    timings: list[MicroBatchTiming] = []
    peaks: dict[int, float] = {}
    for size in sizes_to_time(request.largest_micro_batch_size, request.micro_batch_size):
        spent_s = time.perf_counter() - began
        what = f"micro-batches of {size} and more"
        if timings:
            last = timings[-1]
            forecast_s = last.seconds * size / last.micro_batch_size
            if spent_s + forecast_s * sum(num_passes(forecast_s)) > budget_s:
                reasons.append(f"{what}: at about {forecast_s:.2g} s a pass they exceed {request.budget_s:g} s for all")
                break
            growth = size / last.micro_batch_size
            if on_cpu and (missing := _missing_bytes((growth - 1) * _peak_bytes())) > 0:
                reasons.append(f"{what}: memory lacks about {missing / 2**30:.1f} GiB")
                break
        report(f"micro-batches of {size}", _LOADER_SHARE + _CHECKPOINT_SHARE + spent_s / request.budget_s)
        try:
            timings.append(_time_size(subject, size, budget_s - spent_s))
            peaks[size] = _peak_bytes()
        except ValueError as problem:  # batch norm has nothing to normalise over
            if "more than 1 value per channel" not in str(problem):
                raise
            reasons.append(f"micro-batches of {size}: the model's batch norm needs more samples")
        except RuntimeError as problem:
            if not is_out_of_memory(problem):
                raise
            subject.optimizer.zero_grad(set_to_none=True)
            reasons.append(f"{what}: out of memory")
            break
    return timings, peaks


def is_out_of_memory(problem: RuntimeError) -> bool:
    """Whether a GPU, or the CPU's allocator, has no more."""
    return isinstance(problem, torch.OutOfMemoryError) or "can't allocate memory" in str(problem)


def _peak_bytes() -> float:
    """The most that this process has held in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)


def _missing_bytes(needed_bytes: float) -> float:
    """What this node's memory lacks for so much more; 0 or less: nothing.

    A process that the kernel kills for want of memory leaves no measurement at all.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0
    free_bytes = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    return 0.0 if free_bytes is None else needed_bytes - free_bytes


def _time_size(subject: Subject, size: int, budget_s: float) -> MicroBatchTiming:
    device = subject.run.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = time_steps(subject, size, budget_s).pass_s
    return MicroBatchTiming(size, seconds, torch.cuda.max_memory_allocated(device) if on_gpu else None)


def _time_step(
    subject: Subject,
    request: ProbeRequest,
    timings: Sequence[MicroBatchTiming],
    left_s: float,
    reasons: list[str],
) -> StepTiming | None:
    """A pass and an update of one worker among all those of the plan, or of the largest pass below that was timed."""
    timed = [timing for timing in timings if timing.micro_batch_size <= request.micro_batch_size]
    if not timed:
        return None
    if timed[-1].seconds * sum(num_passes(timed[-1].seconds)) > left_s:
        reasons.append(f"the optimizer: at {timed[-1].seconds:.2g} s a pass it exceeds {request.budget_s:g} s for all")
        return None
    return time_steps(subject, timed[-1].micro_batch_size, left_s, with_updates=True)


# --- beside other workers ---


def _what_fits(
    alone: StepTiming,
    peak_bytes: float,
    request: ProbeRequest,
    facts: env.WorkerFacts,
    left_s: float,
    reasons: list[str],
) -> Together:
    """The same on all workers at once, if it fits into memory and into the time that is left.

    Args:
        peak_bytes: what the worker alone has held.
    """
    what = f"{facts.world_size} workers at the same time"
    if alone.seconds * sum(num_passes(alone.seconds)) > left_s:
        reasons.append(f"{what}: at {alone.seconds:.2g} s a step they exceed {request.budget_s:g} s for all")
        return Together()
    more_bytes = (facts.local_world_size - 1) * peak_bytes
    if request.device_kind == "cpu" and (missing := _missing_bytes(more_bytes)) > 0:
        reasons.append(f"{what}: memory lacks about {missing / 2**30:.1f} GiB")
        return Together()
    return Together(alone.micro_batch_size, left_s)


def _give_orders(together: Together, path: Path) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(to_mapping(together)) + "\n", encoding="utf-8")
    draft.replace(path)


def _wait_for_orders(path: Path) -> Together:
    """Not in a collective: how long the first worker is busy alone nobody can tell, and it would be taken for hung."""
    while not path.exists():
        time.sleep(_LOOK_S)
    return from_mapping(Together, json.loads(path.read_text(encoding="utf-8")))


# --- loader and checkpoints ---


def time_loader(run: Run, train_set: Any, limit_s: float) -> float | None:
    """Samples a second that arrive on the device, augmented, after the first batch; None for a set of one batch."""
    order = epoch_order(len(train_set), min(run.job.global_batch_size, max(1, len(train_set) // 2)), 0, 0)
    batches = run.reader.read(train_set, 0, [order.batch(number) for number in range(order.num_batches)], train=True)
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
            save_weights(run.model.state_dict(), path)
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
    parser = argparse.ArgumentParser(prog="python -m paceline.measure.job_probe", description=__doc__)
    parser.add_argument("folder", type=Path, help="with job.json and request.json; probe.json is left there")
    parser.add_argument("--quiet", action="store_true", help="say nothing")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    job = Job.from_mapping(json.loads((folder / JOB_FILE).read_text(encoding="utf-8")))
    request = from_mapping(ProbeRequest, json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8")))
    is_first = env.worker_facts().rank == 0
    with bar("the job's data and model", is_shown=is_first and not arguments.quiet) as report:
        result = probe(job, request, folder, report)
    if result is not None:
        result.save(folder / RESULT_FILE)


if __name__ == "__main__":
    main()
