"""Callbacks: methods that the training loop calls at its events: steps, evaluations, ends of epochs, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.errors import JobError
from paceline.import_path import checked_options, imported
from paceline.spec import CallbackSpec
from paceline.train.optimizers.optim import build_scheduler

if TYPE_CHECKING:
    from paceline.train.run import Run
    from paceline.train.training import Training


class Callback:
    """Base class of callbacks for a training job. Override the methods of the events you need.

    Every worker has the same callbacks and calls the same methods at the same steps, in the order of the job's list.
    So a callback may make collectives (`training.run.evaluate`, `training.run.whole_state`) as long as it makes them on
    every worker; what one worker is to do alone (print, write a file, log) stands below `if training.run.rank == 0` and
    makes no collective. Whatever changes what is learned (weights, learning rates, `requires_grad`) has to change on
    every worker alike: after each evaluation and each epoch, workers compare their weights and learning rates, and the
    run ends with a `DivergenceError` where they differ. Reading a number from the device, such as `float(loss)`, makes
    the CPU wait for it: do it every so many steps.

    A callback that has `state_dict()` and `load_state_dict(state)` is saved with every checkpoint: they return and
    take tensors, numbers, texts, and lists and dictionaries of these, alike on all workers.
    """

    def run_began(self, training: Training) -> None:
        """Called before the first step, or the first step after a resume."""

    def step_made(self, training: Training, loss: Tensor) -> None:
        """Called after every optimizer update; `loss`, a scalar on the device, is the loss of the global batch."""

    def evaluated(self, training: Training, metrics: Mapping[str, float]) -> None:
        """Called after every evaluation on the test set, with its metrics by name."""

    def epoch_ended(self, training: Training) -> None:
        """Called after each epoch and its evaluation, if any; also if the run ends in the middle of an epoch."""

    def checkpoint_saved(self, training: Training, step: int) -> None:
        """Called when the checkpoint of `step` has been written completely. Checkpoints are written while training
        continues, so `step` is earlier than the current step.

        The last checkpoint of a run is written after `run_ended`; this method is not called for it.
        """

    def run_ended(self, training: Training) -> None:
        """Called after the last step and evaluation, before the record is written; not after an error."""


def build_callbacks(specs: Sequence[CallbackSpec]) -> list[Callback]:
    """The callbacks that a job names. Raises `JobError` for an import path that names no subclass of `Callback`, or an
    option that it does not have."""
    callbacks = []
    for number, spec in enumerate(specs):
        make = imported(spec.name, f"callbacks[{number}].name")
        options = checked_options(make, spec.options, f"the callback {spec.name!r}", f"callbacks[{number}].options")
        callback = make(**options)
        if not isinstance(callback, Callback):
            raise JobError(
                f"callbacks[{number}].name = {spec.name!r} made a {type(callback).__name__}; it should name a subclass "
                "of paceline.Callback."
            )
        callbacks.append(callback)
    return callbacks


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
