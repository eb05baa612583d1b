"""The loop of a `train` job as its callbacks see it: events, evaluations, and the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.spec import EvaluationRecord
from paceline.spec.codec import NOT_NEGATIVE, from_mapping, to_mapping
from paceline.train.batches.agreement import check_same_state
from paceline.train.callbacks import Callback
from paceline.train.run import Run
from paceline.train.session.kept import Stateful


@dataclass(frozen=True)
class _SavedLoop:
    """The loop, as a checkpoint holds it."""

    evaluations: tuple[EvaluationRecord, ...] = ()
    ended_at: int | None = field(default=None, metadata=NOT_NEGATIVE)
    """After which step the callbacks were last told that an epoch had ended."""


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
        self,
        run: Run,
        callbacks: Sequence[Callback],
        evaluate: Callable[[], dict[str, float]],
        steps_per_epoch: int,
        custom: Sequence[Callback] = (),
    ) -> None:
        """
        Args:
            callbacks: the training loop's own callbacks.
            evaluate: evaluates the model on the test set; a collective.
            custom: the callbacks that the job names.
        """
        self.run = run
        self.job = run.job
        self.evaluations: list[EvaluationRecord] = []
        self.epoch = run.steps // steps_per_epoch
        self.is_between_epochs = False
        self._callbacks = (*callbacks, *custom)
        self._evaluate_model = evaluate
        self._steps_per_epoch = steps_per_epoch
        self._compares_workers = bool(custom)
        self._ended_at: int | None = None
        self._wants_save = False
        run.keep("loop", self)
        for number, callback in enumerate(custom):
            if isinstance(callback, Stateful):
                run.keep(f"callback {number}", callback)

    def state_dict(self) -> dict[str, Any]:
        return to_mapping(_SavedLoop(tuple(self.evaluations), self._ended_at))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = from_mapping(_SavedLoop, state)
        self.evaluations, self._ended_at = list(saved.evaluations), saved.ended_at

    def save(self) -> None:
        """Save a checkpoint as soon as all callbacks have seen this event; all workers have to ask for it alike."""
        self._wants_save = True

    def begin(self) -> None:
        """Before the first step of this start."""
        session = self.run.stepper.session
        session.tell_saved = lambda step: self._tell(lambda callback: callback.checkpoint_saved(self, step))
        self._tell(lambda callback: callback.run_began(self))
        steps = self.run.steps
        if steps % self._steps_per_epoch and self._is_due_by_steps and not self._is_evaluated:
            self._evaluate(is_scheduled=True)  # the run was saved before it
        self._compare_and_agree()

    def step_made(self, epoch: int, loss: Tensor) -> None:
        """Tell callbacks of a step of `epoch` with this loss, a scalar on the device; evaluate and save if due."""
        self.epoch, self.is_between_epochs = epoch, False
        self._tell(lambda callback: callback.step_made(self, loss))
        if self.run.steps % self._steps_per_epoch == 0 or self.run.stopping.is_over:
            self.end_epoch(epoch)
        elif self._is_due_by_steps:
            self._evaluate(is_scheduled=True)
            self._compare_and_agree()
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
        is_complete = run.steps % self._steps_per_epoch == 0
        is_scheduled = (is_complete and (epoch + 1) % job.eval_every_epochs == 0) or self._is_due_by_steps
        is_last = epoch == job.epochs - 1 or run.stopping.is_over
        if (is_scheduled or is_last) and not self._is_evaluated and not run.stopping.is_out_of_time:
            self._evaluate(is_scheduled=is_scheduled)
        self._tell(lambda callback: callback.epoch_ended(self))
        self._ended_at = run.steps
        self._compare_and_agree()

    def end(self) -> None:
        """After the last step."""
        self._tell(lambda callback: callback.run_ended(self))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the evaluation after the last step; empty if there was none."""
        return self.evaluations[-1].metrics if self._is_evaluated else {}

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

    def _tell(self, event: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            event(callback)

    def _compare_and_agree(self) -> None:
        """Run collectives that are too expensive for every step: compare workers, agree on stopping, save if asked."""
        run = self.run
        if self._compares_workers:
            holds_all = run.engine.holds_all and not run.engine.weights_diverge
            check_same_state(run.model, run.optimizer, run.world.group, holds_all=holds_all)
        run.stopping.agree()
        if self._wants_save:
            self._save()

    def _save(self) -> None:
        self._wants_save = False
        self.run.save()
