"""The best evaluation of a run, and early stopping.

Both are functions of the evaluations so far, which are the same on all workers and kept with every checkpoint: so a run
ends at the same step on any number of workers, and however often it was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import JobError
from paceline.spec import Job
from paceline.spec.evaluation import EarlyStoppingSpec, EvaluationRecord, Mode, best_place
from paceline.train.callbacks import Callback
from paceline.train.evaluation.objective import METRICS
from paceline.train.training import Training
from paceline.words import number_of


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
