"""The training loop over a job, from data to record. Read it from top to bottom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from paceline import data, models
from paceline.checkpoint import open_storage, save_weights
from paceline.data import ArraySet
from paceline.errors import CheckpointError, reason_of
from paceline.regular_files import refuge, run_file_mode
from paceline.spec import Job, Plan, RunRecord
from paceline.spec.record import RECORD_FILE
from paceline.train.evaluation.objective import accuracy_and_loss, training_loss
from paceline.train.initialize import init
from paceline.train.journal import Journal, RunOutput
from paceline.train.optimizers.optim import build_optimizer
from paceline.train.run import Run
from paceline.train.training import EarlyStopping, Scheduling, Training, build_callbacks

__all__ = ["RunOutput", "data_facts", "train"]


def train(
    job: Job,
    plan: Plan | None,
    output: RunOutput,
    max_steps: int | None = None,
    *,
    max_minutes: float | None = None,
    force: bool = False,
) -> RunRecord:
    """Train `job` and return what happened; rank 0 also writes it into the run folder.

    The launcher of this process sets the number of workers. `max_steps` and `max_minutes` end the run early. A run
    folder with checkpoints is resumed from the newest good one; `force`: even if it is of another job.
    """
    with init(
        job,
        plan=plan,
        max_steps=max_steps,
        max_minutes=max_minutes,
        checkpoint_dir=output.checkpoint_dir,
        force=force,
        progress=output.progress or False,
    ) as run:
        train_set, test_set = data.load(job.data)
        model = models.build(job.model, **data_facts(train_set))
        optimizer = build_optimizer(job.optim, model)
        run.prepare(model, optimizer, example=_example(run, train_set))
        average = None if job.average_decay is None else run.average(job.average_decay)
        loss_fn = training_loss(job.optim)
        steps_per_epoch = -(-len(train_set) // job.global_batch_size)

        journal = Journal(run, output)
        scheduling = [] if job.optim.scheduler.name is None else [Scheduling(run, steps_per_epoch)]
        callbacks = [journal, *scheduling, EarlyStopping(job)]
        training = Training(
            run,
            callbacks,
            evaluate=lambda: run.evaluate(test_set, accuracy_and_loss, model=average),
            steps_per_epoch=steps_per_epoch,
            custom=build_callbacks(job.callbacks),
        )
        training.begin()
        for epoch in run.epochs():
            for batch in run.batches(train_set, epoch):
                training.step_made(epoch, run.step(batch, loss_fn))
            training.end_epoch(epoch)
            if run.stopping.is_over:
                break
        training.end()

        with run.consensus():
            record = journal.record(training, average)
            weights = None
            if job.checkpoint.save_final:
                weights = run.whole_state() if average is None else average.module.state_dict()
            if run.rank == 0:
                _save_results(output.run_dir, weights, record)
        return record


def _save_results(run_dir: Path, weights: dict[str, Tensor] | None, record: RunRecord) -> None:
    """Save what is left of a run in its folder.

    Raises:
        CheckpointError: the run folder cannot be written to; says which folder has everything instead.
    """

    def write(folder: Path) -> None:
        if weights is not None:
            save_weights(weights, open_storage(folder), "model.safetensors")
        record.save(folder / RECORD_FILE, run_file_mode())

    try:
        write(run_dir)
    except OSError as problem:
        why = f"The run is trained, but its folder {run_dir} cannot be written to ({reason_of(problem)})"
        folder = refuge(run_dir.name, write)
        if folder is None:
            raise CheckpointError(f"{why}, and no other can be; its checkpoints are what is left of it.") from None
        raise CheckpointError(f"{why}; its weights and its record are in {folder} instead.") from None


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
