"""The scheduler of a job, moved after its steps or at the ends of its epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from paceline.train.callbacks import Callback
from paceline.train.optimizers.optim import build_scheduler

if TYPE_CHECKING:
    from paceline.train.run import Run
    from paceline.train.training import Training


class Scheduling(Callback):
    """Moves the scheduler of a job that has one."""

    def __init__(self, run: Run, steps_per_epoch: int) -> None:
        spec = run.job.optim.scheduler
        self._steps_per_epoch, self._every = steps_per_epoch, spec.every
        # Of the whole job: max_steps ends a run early and leaves its schedule alone, as that in samples.
        times = run.job.epochs * (1 if spec.every == "epoch" else steps_per_epoch)
        self._scheduler = build_scheduler(spec, run.optimizer, times)
        run.keep("scheduler", self._scheduler)

    def step_made(self, training: Training, loss: Tensor) -> None:  # noqa: ARG002 - an event's arguments
        if self._every == "step":
            self._scheduler.step()

    def epoch_ended(self, training: Training) -> None:
        if self._every == "epoch" and training.run.steps % self._steps_per_epoch == 0:  # the epoch is complete
            self._scheduler.step()
