"""The training loop over a job, from data to record. Read it from top to bottom."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from paceline import data, models
from paceline.checkpoint import save_weights
from paceline.data import ArraySet
from paceline.regular_files import run_file_mode
from paceline.spec import Job, Plan, RunRecord
from paceline.train.final_save import save_at_the_end
from paceline.train.initialize import init
from paceline.train.journal import Journal, RunOutput
from paceline.train.objective import accuracy_and_loss, training_loss
from paceline.train.optim import build_optimizer, build_scheduler
from paceline.train.run import Run

__all__ = ["RunOutput", "data_facts", "train"]


def train(
    job: Job, plan: Plan | None, output: RunOutput, max_steps: int | None = None, *, force: bool = False
) -> RunRecord:
    """Train `job` and return what happened; rank 0 also writes it into the run folder.

    The launcher of this process sets the number of workers. `max_steps` ends the run early. A run folder with
    checkpoints is resumed from the newest good one; `force`: even if it is of another job.
    """
    with init(job, plan=plan, max_steps=max_steps, checkpoint_dir=output.checkpoint_dir, force=force) as run:
        train_set, test_set = data.load(job.data)
        model = models.build(job.model, **data_facts(train_set))
        optimizer = build_optimizer(job.optim, model)
        run.prepare(model, optimizer, example=_example(run, train_set))
        loss_fn, measure = training_loss(job.optim), accuracy_and_loss()

        total_steps = run.total_steps(len(train_set))
        journal = Journal(run, output, total_steps)
        scheduling = Scheduling(run, len(train_set))
        for epoch in run.epochs():
            if run.steps == total_steps:
                break
            for batch in run.batches(train_set, epoch):
                journal.step(epoch, run.step(batch, loss_fn))
                scheduling.after_step()
            is_last = epoch == job.epochs - 1 or run.steps == total_steps
            due = is_last or (epoch + 1) % job.eval_every_epochs == 0
            journal.epoch(epoch, run.evaluate(test_set, measure) if due else {})
            scheduling.after_epoch(epoch)

        with run.consensus():
            record = journal.record()
            weights = run.whole_state() if job.checkpoint.save_final else None
            if run.rank == 0:
                save_at_the_end(functools.partial(_write_results, weights, record), output.run_dir, run.say)
        return record


class Scheduling:
    """The scheduler of a job, if it has one, moved after each step or each epoch and kept with the run."""

    def __init__(self, run: Run, num_samples: int) -> None:
        self._run = run
        self._steps_per_epoch = -(-num_samples // run.job.global_batch_size)
        self._spec = spec = run.job.optim.scheduler
        if spec.name is not None:
            # Of the whole job: max_steps ends a run early and leaves its schedule alone, as that in samples.
            times = run.job.epochs * (1 if spec.every == "epoch" else self._steps_per_epoch)
            self._scheduler = build_scheduler(spec, run.optimizer, times)
            run.keep("scheduler", self._scheduler)

    def after_step(self) -> None:
        if self._spec.name is not None and self._spec.every == "step":
            self._scheduler.step()

    def after_epoch(self, epoch: int) -> None:
        """Called too where max_steps ended the run in the middle of the epoch, which changes nothing."""
        is_over = self._run.steps >= (epoch + 1) * self._steps_per_epoch
        if self._spec.name is not None and self._spec.every == "epoch" and is_over:
            self._scheduler.step()


def _write_results(weights: dict[str, Tensor] | None, record: RunRecord, folder: Path) -> None:
    if weights is not None:
        save_weights(weights, folder / "model.safetensors")
    record.save(folder / "record.json", run_file_mode())


def _example(run: Run, train_set: Any) -> Any:
    """The model's arguments for a shard's samples, if a strategy needs them."""
    if run.mesh.pp == 1:
        return None
    num_samples = max(1, run.job.global_batch_size // run.job.virtual_shards)
    batch = next(iter(run.reader.read(train_set, 0, [np.arange(min(num_samples, len(train_set)))], train=False)))
    return batch[0]


def data_facts(dataset: Any) -> dict[str, Any]:
    """Facts about the data set that a model is built from."""
    if isinstance(dataset, ArraySet):
        shape = dataset.inputs.shape
        if dataset.mean is None:
            return {"vocab_size": dataset.num_classes, "context": shape[1]}
        return {"num_classes": dataset.num_classes, "in_channels": shape[1], "image_size": shape[2]}
    classes = getattr(dataset, "classes", None)
    return {} if classes is None else {"num_classes": len(classes)}
