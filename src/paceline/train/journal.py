"""The journal of a run: what happened so far, for the terminal, for trackers, and for the record."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.optim.swa_utils import AveragedModel

from paceline import env
from paceline.checkpoint.location import IN_RUN_FOLDER
from paceline.spec import EpochRecord, RunRecord
from paceline.spec.codec import MAY_DIVERGE, NOT_NEGATIVE, from_mapping, to_mapping
from paceline.train.batches.batch_warning import batch_warning
from paceline.train.callbacks import Callback
from paceline.train.early_stopping import best_evaluation
from paceline.train.end_table import samples_per_s, shown_metrics
from paceline.train.optimizers.schedule import describe_scaling
from paceline.train.records.digest import weights_sha256
from paceline.train.records.environment import describe_environment
from paceline.train.records.metrics import Sink, open_sinks
from paceline.train.run import Run
from paceline.train.training import Training
from paceline.words import number_of

# Reading a loss makes the CPU wait for the GPU, so losses are read and logged this many steps at a time.
_LOG_STEPS = 50
# Before so many measurements a noise scale is too uncertain to warn of.
_NOISE_STEPS = 50


@dataclass(frozen=True)
class RunOutput:
    """Where a run's results and progress go."""

    run_dir: Path
    progress: TextIO | None
    trackers: Sequence[str] = ()

    @property
    def checkpoint_dir(self) -> Path:
        return self.run_dir / IN_RUN_FOLDER


@dataclass(frozen=True)
class _Saved:
    """A journal, as a checkpoint holds it."""

    epochs: tuple[EpochRecord, ...]
    epoch_loss: float = field(metadata=MAY_DIVERGE)
    epoch_start: tuple[int, float] = field(metadata=NOT_NEGATIVE)
    samples_logged: int = field(metadata=NOT_NEGATIVE)
    has_warned: bool = field()
    train_s: float = field(metadata=NOT_NEGATIVE)
    wall_s: float = field()
    """Releases before this one saved it below 0 where clocks had been set back."""
    epoch_values: dict[str, float] = field(default_factory=dict, metadata=MAY_DIVERGE)


class Journal(Callback):
    """Records every step and epoch; on rank 0 it also prints and logs them."""

    def __init__(self, run: Run, output: RunOutput) -> None:
        speaks = run.rank == 0
        self._run = run
        if output.progress is None:
            run.say = lambda _sentence: None
        self._sinks: list[Sink] = open_sinks(output.run_dir, output.trackers, run.steps, run.say) if speaks else []
        scaling = describe_scaling(run.job)
        self._notes = [] if scaling is None else [scaling]
        run.say(f"{run.job.name} on {number_of(run.world_size, 'worker')}")
        for note in (*run.notes, *self._notes):
            run.say(note)
        self._launched_at = env.launched_at()
        self._first_step_s = 0.0
        self._unread: list[tuple[tuple[str, ...], torch.Tensor]] = []
        """For each step: the names of its values, and [loss, samples, values]."""
        self._epoch_loss = 0.0
        self._epoch_values: dict[str, float] = {}
        self._epoch_start = (0, 0.0)
        self._samples_read = 0
        self._samples_logged = 0
        self._timed_s, self._samples_timed = 0.0, 0
        """Training time and samples when times were last logged."""
        self._epochs: list[EpochRecord] = []
        self._has_warned = False
        self._wall_s = 0.0
        """The time that this run took before it was resumed, up to the checkpoint."""
        run.keep("journal", self)

    def _since_launch_s(self) -> float:
        """Not below zero: the launcher's clock may be another node's, and either may be set back."""
        return max(0.0, time.time() - self._launched_at)

    def state_dict(self) -> dict[str, Any]:
        self._read_losses()
        return {
            "epochs": [to_mapping(epoch) for epoch in self._epochs],
            "epoch_loss": self._epoch_loss,
            "epoch_values": self._epoch_values,
            "epoch_start": self._epoch_start,
            "samples_logged": self._samples_logged,
            "has_warned": self._has_warned,
            "train_s": self._run.timer.train_s,
            "wall_s": self._wall_s + self._since_launch_s(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = from_mapping(_Saved, state)
        self._epochs = list(saved.epochs)
        self._epoch_loss, self._epoch_start = saved.epoch_loss, saved.epoch_start
        self._epoch_values = dict(saved.epoch_values)
        self._samples_logged, self._has_warned = saved.samples_logged, saved.has_warned
        self._samples_read = self._run.samples_seen
        self._run.timer.train_s = saved.train_s
        self._wall_s = saved.wall_s
        self._timed_s, self._samples_timed = saved.train_s, saved.samples_logged

    def step_made(self, training: Training, loss: torch.Tensor) -> None:  # noqa: ARG002 - an event's arguments
        run = self._run
        if not self._first_step_s:
            float(loss)  # on a GPU the step is over when its loss can be read
            self._first_step_s = self._since_launch_s()
        num_samples = run.samples_seen - self._samples_read
        self._samples_read = run.samples_seen
        numbers = [loss, loss.new_full((), num_samples), *run.values.values()]
        self._unread.append((tuple(run.values), torch.stack([number.double() for number in numbers])))
        if len(self._unread) == _LOG_STEPS:
            self._read_losses()

    def _read_losses(self) -> None:
        if not self._unread:
            return
        first = self._run.steps - len(self._unread) + 1
        all_numbers = torch.cat([numbers for _, numbers in self._unread]).tolist()
        for step, (names, numbers) in enumerate(self._unread, start=first):
            loss, num_samples, *values = all_numbers[: len(numbers)]
            del all_numbers[: len(numbers)]
            self._epoch_loss += loss * num_samples
            self._samples_logged += int(num_samples)
            named = dict(zip(names, values, strict=True))
            for name, value in named.items():
                self._epoch_values[name] = self._epoch_values.get(name, 0.0) + value * num_samples
            for sink in self._sinks:
                sink.log(step, named | {"loss": loss, "samples_seen": self._samples_logged})
        self._log_times(len(self._unread))
        self._unread.clear()

    def _log_times(self, num_steps: int) -> None:
        """Log how fast the latest steps were, and where their time went."""
        train_s = self._run.timer.train_s - self._timed_s
        samples = self._samples_logged - self._samples_timed
        self._timed_s, self._samples_timed = self._run.timer.train_s, self._samples_logged
        if not self._sinks or train_s <= 0:
            return
        step_time = self._run.timer.recent(num_steps)
        values = {"time": time.time(), "samples_per_s": samples / train_s}
        values |= {f"step_{part}": seconds for part, seconds in dataclasses.asdict(step_time).items()}
        for sink in self._sinks:
            sink.log(self._run.steps, values)

    def evaluated(self, training: Training, metrics: Mapping[str, float]) -> None:
        if training.is_between_epochs:
            return  # `epoch_ended` says it
        self._read_losses()
        for sink in self._sinks:
            sink.log(self._run.steps, {f"test_{name}": value for name, value in metrics.items()})
        self._run.say(f"step {self._run.steps}  {shown_metrics(metrics)}")

    def epoch_ended(self, training: Training) -> None:
        self._read_losses()
        run, epoch, metrics = self._run, training.epoch, training.metrics
        if run.samples_seen == self._epoch_start[0]:
            return  # the epoch's end was recorded before
        samples, train_s = self._epoch_start
        self._epoch_start = (run.samples_seen, run.timer.train_s)
        lr = float(run.optimizer.param_groups[0]["lr"])
        trained_samples = run.samples_seen - samples
        mean_loss = self._epoch_loss / trained_samples
        step_values = {name: total / trained_samples for name, total in self._epoch_values.items()}
        self._epoch_loss, self._epoch_values = 0.0, {}
        noise_scale = run.noise_scale
        # A run that ended in the middle of an epoch, and was resumed, has a record of its first batches.
        self._epochs = [record for record in self._epochs if record.epoch != epoch]
        epoch_s = run.timer.train_s - train_s
        self._epochs.append(EpochRecord(epoch, mean_loss, lr, epoch_s, metrics, noise_scale, step_values))
        values = {"time": time.time(), "epoch": epoch + 1, "train_loss": mean_loss, "lr": lr}
        values |= {f"train_{name}": value for name, value in step_values.items()}
        if noise_scale is not None:
            values["noise_scale"] = noise_scale
        for sink in self._sinks:
            sink.log(run.steps, values | {f"test_{name}": value for name, value in metrics.items()})
        noise = "" if noise_scale is None else f"  noise scale {noise_scale:,.0f}"
        tested = f"  {shown_metrics(metrics)}" if metrics else ""
        run.say(f"epoch {epoch + 1}/{run.job.epochs}  train loss {mean_loss:.4f}{tested}{noise}")
        self._warn_about_batch(noise_scale)

    def _warn_about_batch(self, noise_scale: float | None) -> None:
        """Warn about the batch size, at most once in a run."""
        run = self._run
        if self._has_warned or noise_scale is None or run.noise.num_measured < _NOISE_STEPS:
            return
        warning = batch_warning(run.job.global_batch_size, noise_scale, run.world_size)
        if warning is not None:
            self._has_warned = True
            self._notes.append(warning)
            run.say(warning)

    def record(self, training: Training, average: AveragedModel | None) -> RunRecord:
        """What happened. A collective.

        Args:
            average: the average of the weights, if that is what is saved.
        """
        run, kept = self._run, self._run.job.kept_checkpoints
        for sink in self._sinks:
            sink.close()
        evaluations = tuple(training.evaluations)
        best = None if kept.keep_best is None else best_evaluation(evaluations, kept.keep_best, kept.best_mode)
        if best is not None:
            run.display.rows["best"] = f"{shown_metrics(best.metrics)} at step {best.step}"
        step_time, (step_p10_s, step_p90_s) = run.timer.median(), run.timer.p10_p90()
        # A checkpoint of an earlier release has the evaluations of epochs alone.
        evaluated = [*(epoch.metrics for epoch in self._epochs), *(one.metrics for one in evaluations)]
        last = next((metrics for metrics in reversed(evaluated) if metrics), {})
        return RunRecord(
            job=run.job,
            plan=run.plan,
            steps=run.steps,
            samples_seen=run.samples_seen,
            accuracy=last.get("accuracy"),
            loss=last.get("loss"),
            train_loss=self._epochs[-1].train_loss if self._epochs else None,
            train_s=run.timer.train_s,
            wall_s=self._wall_s + self._since_launch_s(),
            time_to_first_step_s=self._first_step_s,
            samples_per_s=samples_per_s(run),
            step_time=step_time,
            step_p10_s=step_p10_s,
            step_p90_s=step_p90_s,
            weights_sha256=run.weights_sha256() if average is None else weights_sha256(average.module.state_dict()),
            epochs=tuple(self._epochs),
            notes=(*run.notes, *self._notes),
            environment=describe_environment(run.world),
            evaluations=evaluations,
            best=best,
            stopped=run.stopping.reason,
            is_complete=not run.stopping.is_out_of_time,
        )
