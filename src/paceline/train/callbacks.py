"""The loop of a `train` job as its callbacks see it: events, evaluations and the end; and its own callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from paceline.errors import JobError
from paceline.import_path import import_by_path
from paceline.spec.codec import from_mapping
from paceline.spec.job import CallbackSpec, EarlyStoppingSpec, Mode
from paceline.spec.record import EvaluationRecord, best_place
from paceline.train.optim import build_scheduler, checked_options
from paceline.train.run import Run
from paceline.train.run_state import Stateful
from paceline.words import number_of

METRICS = ("accuracy", "loss")
"""The names of the metrics of an evaluation in a `train` job."""


class Callback:
    """Base class of callbacks for a training job. Override the methods of the events you need.

    Every worker has the same callbacks and calls the same methods at the same steps, in the order of the job's list.
    So a callback may make collectives (`training.run.evaluate`, `training.run.whole_state`) as long as it makes them on
    every worker; what one worker is to do alone (print, write a file, log) stands below `if training.run.rank == 0` and
    makes no collective. Whatever changes what is learned (weights, learning rates, `requires_grad`) has to change on
    every worker alike: the audit at the end of each epoch and before checkpoints ends a run whose workers have other
    weights. Reading a number from the device, such as `float(loss)`, makes the CPU wait for it: do it every so many
    steps.

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


class Training:
    """The training of a job; callbacks receive it as their first argument.

    Attributes:
        run: this worker's `Run`.
        job: what is trained.
        evaluations: all evaluations so far, the same on every worker.
        epoch: the number of the current epoch, from 0 on.
        is_between_epochs: whether the epoch is over: at its evaluation, and at `epoch_ended`.
    """

    def __init__(
        self, run: Run, callbacks: Sequence[Callback], evaluate: Callable[[], dict[str, float]], steps_per_epoch: int
    ) -> None:
        """The job's callbacks come after the loop's own. `evaluate`, a collective, evaluates on the test set. Raises
        `JobError` where the job's early stopping or best checkpoint goes by a metric that evaluations do not have."""
        self.run = run
        self.job = job = run.job
        for key, metric in (
            ("early_stopping.metric", job.early_stopping.metric),
            ("checkpoint.keep_best", job.kept_checkpoints.keep_best),
        ):
            if metric is not None and metric not in METRICS:
                raise JobError(f"{key} = {metric!r} is not a metric of the evaluation; there are {', '.join(METRICS)}.")
        self.evaluations: list[EvaluationRecord] = []
        self.epoch = run.steps // steps_per_epoch
        self.is_between_epochs = False
        custom = build_callbacks(job.callbacks)
        self._callbacks = (*callbacks, *custom)
        self._evaluate_model = evaluate
        self._steps_per_epoch = steps_per_epoch
        self._ended_at: int | None = None
        """The step after which the callbacks were last told that an epoch had ended."""
        self._wants_save = False
        run.keep("loop", self)
        for number, callback in enumerate(custom):
            if isinstance(callback, Stateful):
                run.keep(f"callback {number}", callback)

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": [asdict(one) for one in self.evaluations], "ended_at": self._ended_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.evaluations = [from_mapping(EvaluationRecord, one) for one in state["evaluations"]]
        self._ended_at = state["ended_at"]

    def save(self) -> None:
        """Save a checkpoint as soon as all callbacks have seen this event; all workers have to ask for it alike."""
        self._wants_save = True

    def begin(self) -> None:
        """Before the first step of this start."""
        session = self.run.stepper.session
        session.on_saved = lambda step: self._tell(lambda callback: callback.checkpoint_saved(self, step))
        self._tell(lambda callback: callback.run_began(self))
        self._stop_early()
        if not self.is_epoch_complete and self._is_due_by_steps and not self._is_evaluated:
            self._evaluate(is_scheduled=True)  # the run was saved before it
        self._agree()

    def step_made(self, epoch: int, loss: Tensor) -> None:
        """Tell callbacks of a step of `epoch` with this loss, a scalar on the device; evaluate and save if due."""
        self.epoch, self.is_between_epochs = epoch, False
        self._tell(lambda callback: callback.step_made(self, loss))
        if self.is_epoch_complete or self.run.stopping.is_over:
            self.end_epoch(epoch)
        elif self._is_due_by_steps:
            self._evaluate(is_scheduled=True)
            self._agree()
        elif self._wants_save:
            self._save()

    def end_epoch(self, epoch: int) -> None:
        """End an epoch, or the run in the middle of one: evaluate if due, tell the callbacks, save if asked.

        Does nothing if this was done after the last step already.
        """
        run, job = self.run, self.job
        if self._ended_at == run.steps:
            return
        self.epoch, self.is_between_epochs = epoch, True
        is_scheduled = (self.is_epoch_complete and (epoch + 1) % job.eval_every_epochs == 0) or self._is_due_by_steps
        is_last = epoch == job.epochs - 1 or run.stopping.is_over
        if (is_scheduled or is_last) and not self._is_evaluated and not run.stopping.is_out_of_time:
            self._evaluate(is_scheduled=is_scheduled)
        self._tell(lambda callback: callback.epoch_ended(self))
        self._ended_at = run.steps
        self._agree()

    def end(self) -> None:
        """After the last step."""
        self._tell(lambda callback: callback.run_ended(self))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the evaluation after the last step; empty if there was none."""
        return self.evaluations[-1].metrics if self._is_evaluated else {}

    @property
    def is_epoch_complete(self) -> bool:
        """Whether the last step was its epoch's last one; not where a run ends in the middle of an epoch."""
        return self.run.steps % self._steps_per_epoch == 0

    @property
    def _is_evaluated(self) -> bool:
        return bool(self.evaluations) and self.evaluations[-1].step == self.run.steps

    @property
    def _is_due_by_steps(self) -> bool:
        every = self.job.eval_every_steps
        return every is not None and self.run.steps > 0 and self.run.steps % every == 0

    def _evaluate(self, *, is_scheduled: bool) -> None:
        with self.run.stepper.at_rest():
            metrics = self._evaluate_model()
        self.evaluations.append(EvaluationRecord(self.run.steps, self.epoch, dict(metrics), is_scheduled))
        self._tell(lambda callback: callback.evaluated(self, metrics))
        self._stop_early()
        kept = self.job.kept_checkpoints
        if kept.keep_best is not None:
            best = best_evaluation(self.evaluations, kept.keep_best, kept.best_mode)
            self._wants_save |= best is not None and best.step == self.run.steps

    def _stop_early(self) -> None:
        reason = stop_reason(self.evaluations, self.job.early_stopping)
        if reason is not None:
            self.run.stop(reason)

    def _tell(self, event: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            event(callback)

    def _agree(self) -> None:
        """What is too expensive for every step: agree on stopping, save if asked. A collective."""
        self.run.stopping.agree()
        if self._wants_save:
            self._save()

    def _save(self) -> None:
        self._wants_save = False
        self.run.save()


def build_callbacks(specs: Sequence[CallbackSpec]) -> list[Callback]:
    """The callbacks that a job names. Raises `JobError` for an import path that names no subclass of `Callback`, or an
    option that it does not have."""
    callbacks = []
    for number, spec in enumerate(specs):
        make = import_by_path(spec.name, f"callbacks[{number}].name")
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
        self._every = spec.every
        # Of the whole job: max_steps ends a run early and leaves its schedule alone, as that in samples.
        times = run.job.epochs * (1 if spec.every == "epoch" else steps_per_epoch)
        self._scheduler = build_scheduler(spec, run.optimizer, times)
        run.keep("scheduler", self._scheduler)

    def step_made(self, training: Training, loss: Tensor) -> None:  # noqa: ARG002 - an event's arguments
        if self._every == "step":
            self._scheduler.step()

    def epoch_ended(self, training: Training) -> None:
        if self._every == "epoch" and training.is_epoch_complete:
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


def stop_reason(evaluations: Sequence[EvaluationRecord], spec: EarlyStoppingSpec) -> str | None:
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
