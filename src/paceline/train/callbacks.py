"""Callbacks: methods that the training loop calls at its events: steps, evaluations, ends of epochs, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.errors import JobError
from paceline.import_path import checked_options, imported
from paceline.spec import CallbackSpec, Job
from paceline.spec.evaluation import EarlyStoppingSpec, EvaluationRecord, Mode, best_place
from paceline.train.evaluation.objective import METRICS
from paceline.train.optimizers.optim import build_scheduler
from paceline.words import number_of

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


# --- the best evaluation, and early stopping ---
#
# Functions of the evaluations so far, which are the same on all workers and kept with every checkpoint: so a run ends
# at the same step on any number of workers, and however often it was interrupted.


def best_evaluation(
    evaluations: Sequence[EvaluationRecord], metric: str, mode: Mode, min_change: float = 0.0
) -> EvaluationRecord | None:
    """The evaluation with the best value of `metric`, as `best_place` says; None if no value is finite."""
    place = best_place([one.metrics[metric] for one in evaluations], metric, mode, min_change)
    return None if place is None else evaluations[place]


def why_to_stop(evaluations: Sequence[EvaluationRecord], spec: EarlyStoppingSpec) -> str | None:
    """The reason to stop a run after these evaluations, in a few words; None to continue training.

    Evaluations that were made only because a run ended do not count: had it not ended there, they would not exist.
    """
    if spec.metric is None:
        return None
    counted = [evaluation for evaluation in evaluations if evaluation.is_scheduled]
    best = best_evaluation(counted, spec.metric, spec.mode, spec.min_change)
    num_since = len(counted) if best is None else len(counted) - 1 - counted.index(best)
    if num_since < spec.patience:
        return None
    times = number_of(num_since, "evaluation")
    if best is None:
        return f"{spec.metric} was not finite in {times}"
    return f"{spec.metric} has not improved for {times}; best {best.metrics[spec.metric]:.6g} at step {best.step}"


class EarlyStopping(Callback):
    """Ends the run when its evaluations do not get better any more, and has the best checkpoint saved."""

    def __init__(self, job: Job) -> None:
        """Raises `JobError` for a metric that evaluations do not have."""
        self._spec, kept = job.early_stopping, job.kept_checkpoints
        self._metric, self._mode = kept.keep_best, kept.best_mode
        for key, metric in (("early_stopping.metric", self._spec.metric), ("checkpoint.keep_best", self._metric)):
            if metric is not None and metric not in METRICS:
                raise JobError(f"{key} = {metric!r} is not a metric of the evaluation; there are {', '.join(METRICS)}.")

    def run_began(self, training: Training) -> None:
        self._stop(training)

    def evaluated(self, training: Training, metrics: object) -> None:  # noqa: ARG002 - `training` has all of them
        self._stop(training)
        if self._metric is not None:
            best = best_evaluation(training.evaluations, self._metric, self._mode)
            if best is not None and best.step == training.run.steps:
                training.save()

    def _stop(self, training: Training) -> None:
        reason = why_to_stop(training.evaluations, self._spec)
        if reason is not None:
            training.run.stop(reason)
