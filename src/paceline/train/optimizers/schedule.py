"""The learning rate as a pure function of how many samples have been seen."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from paceline.errors import ModelError
from paceline.spec import Job


class LearningRates:
    """An optimizer's learning rates: the job's schedule times its base rates, which are those it has now."""

    def __init__(self, job: Job, optimizer: Optimizer) -> None:
        """
        Raises:
            ModelError: the optimizer's groups have no learning rates, or none that the job's schedule could change.
        """
        if not all("lr" in group for group in optimizer.param_groups):
            raise ModelError(
                f"{type(optimizer).__name__}.param_groups have no 'lr', by which learning rates are set and compared; "
                "an optimizer around another one should have its groups: self.param_groups = inner.param_groups."
            )
        self._job = job
        self._optimizer = optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        # None: the optimizer finds its rate itself, as Adafactor of transformers does with relative_step.
        self._base = [None if rate is None else float(rate) for rate in rates]
        self._is_scheduled = counts_epochs(job) or job.optim.base_batch_size is not None
        if self._is_scheduled and None in self._base:
            raise ModelError(
                f"{type(optimizer).__name__} finds its learning rate itself (lr is None), so the job's schedule has "
                "none to change: give the optimizer a rate, or the job no schedule, warm-up or base batch size."
            )

    def set(self, samples_seen: int, samples_per_epoch: int) -> None:
        """For the step after `samples_seen` samples; without a schedule the rates are the script's business."""
        if self._is_scheduled:
            factor = lr_factor(self._job, samples_seen, samples_per_epoch)
            self._write([None if base is None else base * factor for base in self._base])

    @contextmanager
    def at_base(self) -> Iterator[Optimizer]:
        """A context in which the optimizer has its base rates."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        self._write(self._base)
        try:
            yield self._optimizer
        finally:
            self._write(rates)

    def _write(self, rates: list[float | None]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def counts_epochs(job: Job) -> bool:
    """Whether the learning rate depends on how many epochs have passed."""
    return job.optim.schedule != "constant" or job.optim.warmup_epochs > 0


def lr_factor(job: Job, samples_seen: int, samples_per_epoch: int) -> float:
    """The factor on the optimizer's own rate for the step that begins after `samples_seen` samples.

    Warm-up rises linearly, counted to the end of the step, from the unscaled rate if scaling raised it (Goyal et
    al. 2017, section 2.2), else from zero. Decay follows the job's schedule over all its epochs.
    """
    optim, scale = job.optim, job.lr_scale
    progress = min(1.0, samples_seen / (job.epochs * samples_per_epoch))
    decay = 1.0
    if optim.schedule == "cosine":
        decay = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif optim.schedule == "linear":
        decay = 1.0 - progress
    elif optim.schedule == "step":
        decay = float(optim.step_factor ** bisect_right(optim.step_epochs, samples_seen / samples_per_epoch))
    factor = scale * decay
    warmup = optim.warmup_epochs * samples_per_epoch
    if samples_seen >= warmup:
        return factor
    warmed = min(1.0, (samples_seen + job.global_batch_size) / warmup)
    start = 1.0 / scale if scale > 1.0 else 0.0
    return factor * (start + (1.0 - start) * warmed)


def describe_scaling(job: Job) -> str | None:
    """One sentence for the log when the batch changed the rate; None when it did not."""
    factor = job.lr_scale
    if factor == 1.0:
        return None
    return (
        f"Learning rate {job.optim.lr:g} x {factor:g} = {job.optim.lr * factor:g}: global batch "
        f"{job.global_batch_size} is {job.global_batch_size / (job.optim.base_batch_size or 1):g} times the base batch "
        f"{job.optim.base_batch_size} ({job.optim.lr_scaling} rule, warm-up {job.optim.warmup_epochs:g} epochs)."
    )
