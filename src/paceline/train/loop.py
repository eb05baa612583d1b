"""The training loop over a job, from data to record. Read it from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from paceline import data, env, models
from paceline.checkpoint import save_weights
from paceline.data import ArraySet
from paceline.parallel import AsyncServers
from paceline.spec import EpochRecord, Job, Plan, RunRecord
from paceline.spec.codec import from_mapping, to_mapping
from paceline.train.asynchronous import AsynchronousSteps
from paceline.train.batch_warning import batch_warning
from paceline.train.environment import describe_environment
from paceline.train.metrics import Sink, open_sinks
from paceline.train.objective import accuracy_and_loss, training_loss
from paceline.train.optim import build_optimizer
from paceline.train.progress import Progress
from paceline.train.run import LossFn, Run, init
from paceline.train.schedule import describe_scaling

# Reading a loss makes the host wait for a GPU, so losses are read and logged this many steps at a time.
_LOG_STEPS = 50
# Before so many measurements a noise scale is too uncertain to warn of.
_NOISE_STEPS = 50


@dataclass(frozen=True)
class RunOutput:
    """Where a run's results and words go."""

    run_dir: Path
    progress: TextIO | None
    trackers: Sequence[str] = ()

    @property
    def checkpoint_dir(self) -> Path:
        return self.run_dir / "checkpoints"


def train(
    job: Job, plan: Plan | None, output: RunOutput, max_steps: int | None = None, *, force: bool = False
) -> RunRecord:
    """Train `job` and return what happened; rank 0 also writes it into the run folder.

    The number of workers comes from whoever started this process. `max_steps` ends the run early. A run folder with
    checkpoints is gone on with, from the newest good one; `force`: even if they are of another job.
    """
    with init(job, plan=plan, max_steps=max_steps, checkpoint_dir=output.checkpoint_dir, force=force) as run:
        train_set, test_set = data.load(job.data)
        model = models.build(job.model, **data_facts(train_set))
        optimizer = build_optimizer(job.optim, model)
        model, _optimizer = run.prepare(model, optimizer, example=_example(run, train_set))
        loss_fn, measure = training_loss(job.optim), accuracy_and_loss()

        total_steps = run.total_steps(len(train_set))
        journal = _Journal(run, output, total_steps)
        with _steps(run, train_set, loss_fn) as steps_of:
            for epoch in run.epochs():
                if run.steps == total_steps:
                    break
                for loss in steps_of(epoch):
                    journal.step(epoch, loss)
                is_last = epoch == job.epochs - 1 or run.steps == total_steps
                due = is_last or (epoch + 1) % job.eval_every_epochs == 0
                journal.epoch(epoch, run.evaluate(test_set, measure) if due else {})

        with run.consensus():
            record = journal.record()
            if job.checkpoint.save_final:
                weights = run.whole_state()
                if run.rank == 0:
                    save_weights(weights, output.run_dir / "model.safetensors")
        if run.rank == 0:
            record.save(output.run_dir / "record.json")
        return record


@contextmanager
def _steps(run: Run, train_set: Any, loss_fn: LossFn) -> Iterator[Callable[[int], Iterator[torch.Tensor]]]:
    """The updates of an epoch, one loss each: made together by all workers, or by servers as shards arrive."""
    if isinstance(run.engine, AsyncServers):
        with AsynchronousSteps(run, run.engine, train_set, loss_fn).opened() as epoch_steps:
            yield epoch_steps
    else:
        yield lambda epoch: (run.step(batch, loss_fn) for batch in run.batches(train_set, epoch))


def _example(run: Run, train_set: Any) -> Any:
    """What the model is called with for a shard's samples, where that is asked for."""
    if run.mesh.pp == 1:
        return None
    num_samples = max(1, run.job.global_batch_size // run.job.virtual_shards)
    batch = next(iter(run.read(train_set, 0, [np.arange(min(num_samples, len(train_set)))], train=False)))
    return batch[0]


def data_facts(dataset: Any) -> dict[str, Any]:
    """What a model may want to know of its data."""
    if isinstance(dataset, ArraySet):
        shape = dataset.inputs.shape
        if dataset.mean is None:
            return {"vocab_size": dataset.num_classes, "context": shape[1]}
        return {"num_classes": dataset.num_classes, "in_channels": shape[1], "image_size": shape[2]}
    classes = getattr(dataset, "classes", None)
    return {} if classes is None else {"num_classes": len(classes)}


class _Journal:
    """What happened so far; rank 0's also speaks and writes."""

    def __init__(self, run: Run, output: RunOutput, total_steps: int) -> None:
        speaks = run.rank == 0
        self._run = run
        self._sinks: list[Sink] = open_sinks(output.run_dir, output.trackers, run.steps) if speaks else []
        label = f"{run.job.name} on {run.world_size} worker{'s' if run.world_size > 1 else ''}"
        self._progress = Progress(output.progress if speaks else None, total_steps, label)
        run.say = self._progress.say
        scaling = describe_scaling(run.job)
        self._notes = [*run.notes, *([] if scaling is None else [scaling])]
        for note in self._notes:
            self._progress.say(note)
        self._launched_at = env.launched_at()
        self._first_step_s = 0.0
        self._unread: list[torch.Tensor] = []
        self._epoch_loss = 0.0
        self._epoch_start = (0, 0.0)
        self._samples_read = 0
        self._samples_logged = 0
        self._epochs: list[EpochRecord] = []
        self._has_warned = False
        self._wall_s = 0.0
        """Of earlier processes of this run, up to the checkpoint."""
        run.keep("journal", self)

    def state_dict(self) -> dict[str, Any]:
        self._read_losses()
        return {
            "epochs": [to_mapping(epoch) for epoch in self._epochs],
            "epoch_loss": self._epoch_loss,
            "epoch_start": self._epoch_start,
            "samples_logged": self._samples_logged,
            "has_warned": self._has_warned,
            "train_s": self._run.timer.train_s,
            "wall_s": self._wall_s + time.time() - self._launched_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epochs = [from_mapping(EpochRecord, epoch) for epoch in state["epochs"]]
        self._epoch_loss, self._epoch_start = state["epoch_loss"], state["epoch_start"]
        self._samples_logged, self._has_warned = state["samples_logged"], state["has_warned"]
        self._samples_read = self._run.samples_seen
        self._run.timer.train_s = state["train_s"]
        self._wall_s = state["wall_s"]

    def step(self, epoch: int, loss: torch.Tensor) -> None:
        run = self._run
        if not self._first_step_s:
            float(loss)  # on a GPU the step is over when its loss can be read
            self._first_step_s = time.time() - self._launched_at
        num_samples = run.samples_seen - self._samples_read
        self._samples_read = run.samples_seen
        self._unread.append(torch.stack([loss.double(), loss.new_full((), num_samples).double()]))
        self._progress.step(run.steps, epoch, loss, num_samples)
        if len(self._unread) == _LOG_STEPS:
            self._read_losses()

    def _read_losses(self) -> None:
        if not self._unread:
            return
        first = self._run.steps - len(self._unread) + 1
        for step, (loss, num_samples) in enumerate(torch.stack(self._unread).tolist(), start=first):
            self._epoch_loss += loss * num_samples
            self._samples_logged += int(num_samples)
            for sink in self._sinks:
                sink.log(step, {"loss": loss, "samples_seen": self._samples_logged})
        self._unread.clear()

    def epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        self._read_losses()
        run = self._run
        samples, train_s = self._epoch_start
        self._epoch_start = (run.samples_seen, run.timer.train_s)
        lr = float(run.optimizer.param_groups[0]["lr"])
        mean_loss = self._epoch_loss / (run.samples_seen - samples)
        self._epoch_loss = 0.0
        noise_scale = run.noise_scale
        # A run that was ended in the middle of an epoch, and goes on, has a record of that part.
        self._epochs = [record for record in self._epochs if record.epoch != epoch]
        self._epochs.append(EpochRecord(epoch, mean_loss, lr, run.timer.train_s - train_s, metrics, noise_scale))
        values = {"epoch": epoch + 1, "train_loss": mean_loss, "lr": lr}
        if noise_scale is not None:
            values["noise_scale"] = noise_scale
        for sink in self._sinks:
            sink.log(run.steps, values | {f"test_{name}": value for name, value in metrics.items()})
        tested = "".join(f"  {name} {_metric(name, value)}" for name, value in metrics.items())
        noise = "" if noise_scale is None else f"  noise scale {noise_scale:,.0f}"
        self._progress.say(f"epoch {epoch + 1}/{run.job.epochs}  train loss {mean_loss:.4f}{tested}{noise}")
        self._warn_about_batch(noise_scale)

    def _warn_about_batch(self, noise_scale: float | None) -> None:
        """Once a run."""
        run = self._run
        if self._has_warned or noise_scale is None or run.noise.num_measured < _NOISE_STEPS:
            return
        warning = batch_warning(run.job.global_batch_size, noise_scale, run.world_size)
        if warning is not None:
            self._has_warned = True
            self._notes.append(warning)
            self._progress.say(warning)

    def record(self) -> RunRecord:
        run = self._run
        for sink in self._sinks:
            sink.close()
        self._progress.close()
        step_time = run.timer.median()
        evaluated = [e.metrics for e in self._epochs if e.metrics]
        last = evaluated[-1] if evaluated else {}
        samples_per_s = run.samples_seen / run.timer.train_s
        # Where workers meet every few steps, the median step is one without a meeting.
        if step_time.total_s and run.job.aggregation.method == "every_step":
            samples_per_s = min(run.job.global_batch_size, run.samples_seen) / step_time.total_s
        return RunRecord(
            job=run.job,
            plan=run.plan,
            steps=run.steps,
            samples_seen=run.samples_seen,
            accuracy=last.get("accuracy"),
            loss=last.get("loss"),
            train_loss=self._epochs[-1].train_loss if self._epochs else None,
            train_s=run.timer.train_s,
            wall_s=self._wall_s + time.time() - self._launched_at,
            time_to_first_step_s=self._first_step_s,
            samples_per_s=samples_per_s,
            step_time=step_time,
            weights_sha256=run.weights_sha256(),
            epochs=tuple(self._epochs),
            notes=tuple(self._notes),
            environment=describe_environment(run.world),
        )


def _metric(name: str, value: float) -> str:
    return f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"
