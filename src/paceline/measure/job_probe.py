"""The program that times a job's parts: passes through the model, updates, the loader, checkpoints, workers together.

    python -m paceline.measure.job_probe REQUEST.json OUT

It reads a `JobRequest`; the first worker leaves a `JobProbe`. That worker is timed alone, while the others wait for a
file in the request's folder; then all compute at the same time, because the workers of a node share memory, caches and
power.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline import data, env, models
from paceline.checkpoint.load import save_weights
from paceline.checkpoint.storage import Storage
from paceline.data import ArraySet
from paceline.data.order import ShuffledOrder
from paceline.measure.load import LoadMeter, most_disturbed
from paceline.measure.program import Report, run_program, unreported
from paceline.measure.sharding import time_sharding
from paceline.measure.steps import StepTiming, Subject, num_passes, time_steps
from paceline.measure.stopwatch import Stopwatch, seconds_of
from paceline.measure.values import JOB_FILE, JobProbe, JobRequest
from paceline.measure.workers import free_bytes
from paceline.measure.workers_together import Together, time_together
from paceline.spec import JobTiming, MicroBatchTiming, Plan
from paceline.train.loop import data_facts
from paceline.train.meters import settle
from paceline.train.objective import training_loss
from paceline.train.optim import build_optimizer
from paceline.train.process_group import join
from paceline.train.run import Run

READY_FILE = "ready{rank}"
"""Tells the first worker that this one is ready, and idle from now on."""
TOGETHER_FILE = "together.json"
"""Tells the workers that wait how many samples all of them are to compute, and for how long."""

_LOADER_SHARE, _CHECKPOINT_SHARE, _TOGETHER_SHARE = 0.1, 0.1, 0.4
"""Shares of the budget; the rest is for passes on one worker."""
_LOADER_S = 5.0
_NUM_CHECKPOINTS = 3
_LOOK_S = 0.05
"""How often a worker that waits looks for the file."""


def probe_job(request: JobRequest, report: Report = unreported) -> JobProbe | None:
    """Time the parts of the job on this process's device; None on all workers but the first."""
    report("the job's data and model", 0.0)
    facts, job = env.worker_facts(), request.job
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
        folder = Path(request.folder)
        orders = folder / TOGETHER_FILE
        if facts.rank > 0:
            (folder / READY_FILE.format(rank=facts.rank)).touch()
            wanted = _wait_for_orders(orders)
            if wanted.micro_batch_size:
                world = join(facts, plan)
                time_together(subject, world, job, plan, wanted)
                time_sharding(world, run.model, plan.timeout_s)
            return None
        while not all((folder / READY_FILE.format(rank=rank)).exists() for rank in range(1, facts.world_size)):
            time.sleep(_LOOK_S)  # workers that still prepare would disturb the one that is timed alone
        first = FirstWorker(subject, request, facts, report)
        timing, step, peak_bytes = first.time_alone()
        together = first.what_fits_together(step, peak_bytes)
        together.save(orders)
        if step is not None and together.micro_batch_size:
            report(f"{facts.world_size} workers at the same time", 1.0 - _TOGETHER_SHARE)
            world = join(facts, plan)
            timed = time_together(subject, world, job, plan, together)
            timing = dataclasses.replace(
                timing,
                workers_together=facts.world_size,
                workers_together_on_node=request.workers_on_node,
                together_micro_batch_size=together.micro_batch_size,
                together_slowdown=timed.step_s / step.seconds,
                sums=timed.sums,
                sharding=time_sharding(world, run.model, plan.timeout_s),
                load=most_disturbed([timing.load, timed.load]),
            )
        return JobProbe(timing, tuple(first.not_measured))


def _wait_for_orders(path: Path) -> Together:
    """Wait without a collective: the first worker may be busy for any time, and a collective would count as a hang."""
    while not path.exists():
        time.sleep(_LOOK_S)
    return Together.load(path)


@dataclass
class FirstWorker:
    """The measurements of the worker that is timed alone, within one budget."""

    subject: Subject
    request: JobRequest
    facts: env.WorkerFacts
    report: Report = unreported
    not_measured: list[str] = field(default_factory=list)
    """A sentence for everything that was left out."""

    def __post_init__(self) -> None:
        self.budget = Stopwatch(self.request.budget_s)

    def time_alone(self) -> tuple[JobTiming, StepTiming | None, float]:
        """The loader, checkpoints, passes size by size, and an update, while all other workers wait.

        Returns:
            The timing of the job by this worker alone; a step of one worker among all those of the plan, None if it was
            not measured; and the most that the process held until it had timed the passes of that step, in bytes.
        """
        run, train_set, request = self.subject.run, self.subject.train_set, self.request
        self.report("the loader", 0.0)
        samples_per_s = time_loader(run, train_set, min(_LOADER_S, request.budget_s * _LOADER_SHARE))
        if samples_per_s is None:
            self.not_measured.append("the loader: the training set is a single sample")
        self.report("checkpoints", _LOADER_SHARE)
        checkpoint_rate = time_checkpoint(run, Path(request.folder), request.budget_s * _CHECKPOINT_SHARE)
        kept_s = request.budget_s * _TOGETHER_SHARE if self.facts.world_size > 1 else 0.0
        meter = LoadMeter(run.device)
        timings, peaks = self.time_micro_batches(kept_s)
        self.report("the optimizer", 1.0 - _TOGETHER_SHARE)
        step = self.time_step(timings)
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
            load=meter.load(),
            num_samples=len(train_set) or None,
            settings=run.job.timed_settings,
        )
        return timing, step, 0.0 if step is None else peaks[step.micro_batch_size]

    def time_micro_batches(self, kept_s: float = 0.0) -> tuple[list[MicroBatchTiming], dict[int, float]]:
        """Median seconds of a forward and backward pass, size by size, until one does not fit into memory or budget.

        The smallest size is timed in any case, if memory has room for it.

        Args:
            kept_s: the part of the budget that is kept for later.

        Returns:
            The timings, and by size the bytes that this process had held at most until then.
        """
        timings: list[MicroBatchTiming] = []
        peaks: dict[int, float] = {}
        for size in sizes_to_time(self.request.largest_micro_batch_size, self.request.micro_batch_size):
            what = f"micro-batches of {size} and more"
            left_s = self.budget.left_s - kept_s
            if timings and not self._may_grow(timings[-1], size, left_s, what):
                break
            self.report(f"micro-batches of {size}", self.budget.spent_s / self.request.budget_s)
            try:
                timings.append(_time_size(self.subject, size, left_s))
                peaks[size] = _peak_bytes()
            except ValueError as problem:  # batch norm has nothing to normalise over
                if "more than 1 value per channel" not in str(problem):
                    raise
                self.not_measured.append(f"micro-batches of {size}: the model's batch norm needs more samples")
            except torch.OutOfMemoryError:
                self.subject.optimizer.zero_grad(set_to_none=True)
                self.not_measured.append(f"{what}: out of memory")
                break
        return timings, peaks

    def _may_grow(self, last: MicroBatchTiming, size: int, left_s: float, what: str) -> bool:
        growth = size / last.micro_batch_size
        pass_s = last.seconds * growth
        if pass_s * sum(num_passes(pass_s)) > left_s:
            return self._leave_out(f"{what}: at about {pass_s:.2g} s a pass they exceed {self._all_s}")
        return self.subject.run.device.type != "cpu" or self._fits_memory(what, (growth - 1) * _peak_bytes())

    def time_step(self, timings: Sequence[MicroBatchTiming]) -> StepTiming | None:
        """A pass and an update of one worker among all those of the plan, or of the largest smaller pass timed."""
        timed = [timing for timing in timings if timing.micro_batch_size <= self.request.micro_batch_size]
        if not timed:
            return None
        pass_s = timed[-1].seconds
        if pass_s * sum(num_passes(pass_s)) > self.budget.left_s:
            self._leave_out(f"the optimizer: at {pass_s:.2g} s a pass it exceeds {self._all_s}")
            return None
        return time_steps(self.subject, timed[-1].micro_batch_size, self.budget.left_s, with_updates=True)

    def what_fits_together(self, alone: StepTiming | None, peak_bytes: float) -> Together:
        """The same step on all workers at once, if it fits into memory and into the time that is left.

        Args:
            peak_bytes: what the worker alone has held.
        """
        if alone is None or self.facts.world_size == 1:
            return Together()
        what = f"{self.facts.world_size} workers at the same time"
        left_s = self.budget.left_s
        if alone.seconds * sum(num_passes(alone.seconds)) > left_s:
            self._leave_out(f"{what}: at {alone.seconds:.2g} s a step they exceed {self._all_s}")
            return Together()
        more_bytes = (self.facts.local_world_size - 1) * peak_bytes
        if self.request.device_kind == "cpu" and not self._fits_memory(what, more_bytes):
            return Together()
        return Together(alone.micro_batch_size, left_s)

    def _fits_memory(self, what: str, more_bytes: float) -> bool:
        """Not tried out: a process that the kernel kills for want of memory leaves no measurement at all."""
        missing = more_bytes - free_bytes(torch.device("cpu"))
        return missing <= 0 or self._leave_out(f"{what}: memory lacks about {missing / 2**30:.1f} GiB")

    @property
    def _all_s(self) -> str:
        return f"{self.request.budget_s:g} s for all"

    def _leave_out(self, reason: str) -> bool:
        self.not_measured.append(reason)
        return False


def _loads_between_passes(run: Run, train_set: Any) -> bool:
    """Whether the worker loads batches itself: on a CPU without loader processes."""
    has_processes = run.job.data.loader_workers > 0 and not isinstance(train_set, ArraySet)
    return run.device.type == "cpu" and not has_processes


def sizes_to_time(largest: int, *others: int) -> list[int]:
    """1, 2, 4, … and `largest` itself, with the others among them."""
    powers = itertools.takewhile(lambda size: size < largest, (2**power for power in itertools.count()))
    return sorted({*powers, *(size for size in others if size < largest), largest})


def _peak_bytes() -> float:
    """The most that this process has held in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _time_size(subject: Subject, size: int, budget_s: float) -> MicroBatchTiming:
    device = subject.run.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    timed = time_steps(subject, size, budget_s)
    peak_bytes = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return MicroBatchTiming(size, timed.pass_s, peak_bytes, timed.spread)


def time_loader(run: Run, train_set: Any, limit_s: float) -> float | None:
    """Samples a second that arrive on the device, augmented, after the first batch; None for a set of one batch."""
    order = ShuffledOrder(len(train_set), min(run.job.global_batch_size, max(1, len(train_set) // 2)), 0, 0)
    batches = run.reader.read(train_set, 0, map(order.batch, range(order.num_batches)), train=True)
    if order.num_batches < 2:
        return None
    next(batches)  # starts processes, fills caches
    settle(run.device)
    stopwatch = Stopwatch()
    num_samples = 0
    for number, _ in enumerate(batches, 1):
        num_samples += len(order.batch(number))
        if stopwatch.spent_s > limit_s:
            break
    settle(run.device)
    return num_samples / stopwatch.spent_s


def time_checkpoint(run: Run, folder: Path, limit_s: float) -> float:
    """Bytes a second that are safely on the disk of `folder`: written as a run writes its weights, then fsync."""
    path = folder / "probe.safetensors"

    def write() -> None:
        save_weights(run.model.state_dict(), Storage(path.parent), path.name)
        for place in (path, folder):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    stopwatch = Stopwatch()
    times_s: list[float] = []
    try:
        while not times_s or (len(times_s) < _NUM_CHECKPOINTS and stopwatch.spent_s < limit_s):
            times_s.append(seconds_of(write))
        return path.stat().st_size / statistics.median(times_s)
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    run_program(__doc__, JobRequest, probe_job, JOB_FILE)
