"""The program of one worker, and its training loop over a job, from data to record. Read it from top to bottom."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import data, env, models
from paceline.checkpoint.format import IN_RUN_FOLDER, Storage
from paceline.checkpoint.load import save_weights
from paceline.data import ArraySet, Loading, SampleRequest
from paceline.errors import CheckpointError, ModelError, file_problems
from paceline.files import make_run_folder, run_file_mode
from paceline.spec import Job, Plan, RunRecord
from paceline.spec.job import JOB_FILE, OptimSpec
from paceline.spec.plan import LIMIT_FILE, PLAN_FILE, RunLimit
from paceline.spec.record import RECORD_FILE
from paceline.train.callbacks import Scheduling, Training
from paceline.train.journal import Journal
from paceline.train.optim import build_optimizer
from paceline.train.peers import tell_failures
from paceline.train.run import Run, init
from paceline.words import number_of


def main() -> None:
    """Train the job of a run folder, whose job, plan and limit are files there, as one worker of its launch."""
    parser = argparse.ArgumentParser(prog="python -m paceline.train", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, help="folder with job.json, plan.json and, for a limit, limit.json")
    parser.add_argument("--quiet", action="store_true", help="say nothing")
    parser.add_argument("--track", action="append", default=[], help="also log to tensorboard, wandb or mlflow")
    parser.add_argument("--force", action="store_true", help="resume even a checkpoint of another job")
    parser.add_argument("--job", help="the job itself, as JSON, for a folder without job.json")
    parser.add_argument("--plan", help="the plan itself, as JSON")
    arguments = parser.parse_args()
    tell_failures(env.worker_facts())
    run_dir: Path = arguments.run_dir
    make_run_folder(run_dir)
    job = Job.from_mapping(json.loads(arguments.job)) if arguments.job else Job.load(run_dir / JOB_FILE)
    plan = Plan.from_mapping(json.loads(arguments.plan)) if arguments.plan else Plan.load(run_dir / PLAN_FILE)
    limit = run_dir / LIMIT_FILE
    is_limited = arguments.job is None and limit.exists()
    limits = RunLimit.load(limit) if is_limited else RunLimit()
    quiet, trackers, force = arguments.quiet, arguments.track, arguments.force
    train(job, plan, run_dir, limits.max_steps, limits.max_minutes, quiet=quiet, trackers=trackers, force=force)


def train(
    job: Job,
    plan: Plan | None,
    run_dir: Path,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    *,
    quiet: bool = False,
    trackers: Sequence[str] = (),
    force: bool = False,
) -> RunRecord:
    """Train `job` and return what happened; rank 0 also writes it into the run folder.

    The launcher of this process sets the number of workers. `max_steps` and `max_minutes` end the run early. A run
    folder with checkpoints is resumed from the newest good one; `force`: even if it is of another job. Raises
    `CheckpointError` where the run folder cannot be written to.
    """
    with init(
        job,
        plan=plan,
        max_steps=max_steps,
        max_minutes=max_minutes,
        checkpoint_dir=run_dir / IN_RUN_FOLDER,
        force=force,
        progress=not quiet,
    ) as run:
        if not quiet:
            run.say(f"{job.name} on {number_of(run.world_size, 'worker')}")
        train_set, test_set = data.load(job.data)
        model = models.build(job.model, **data_facts(train_set))
        optimizer = build_optimizer(job.optim, model)
        run.prepare(model, optimizer, example=_example(run, train_set))
        average = None if job.average_decay is None else run.average(job.average_decay)
        loss_fn = training_loss(job.optim)
        steps_per_epoch = -(-len(train_set) // job.global_batch_size)

        if quiet:
            run.say = lambda _sentence: None
        journal = Journal(run, run_dir, trackers)
        scheduling = [] if job.optim.scheduler.name is None else [Scheduling(run, steps_per_epoch)]
        evaluate = functools.partial(run.evaluate, test_set, accuracy_and_loss, model=average)
        training = Training(run, [journal, *scheduling], evaluate, steps_per_epoch)
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
                what = f"The run is trained, but its folder {run_dir} cannot be written to"
                with file_problems(what, CheckpointError, f"last checkpoint: {run.stepper.session.newest_checkpoint}"):
                    if weights is not None:
                        save_weights(weights, Storage(run_dir), "model.safetensors")
                    record.save(run_dir / RECORD_FILE, run_file_mode())
        return record


def _example(run: Run, train_set: Any) -> Any:
    """The model's arguments for a shard's samples, if a strategy needs them."""
    if run.mesh.pp == 1:
        return None
    num_samples = min(max(1, run.job.global_batch_size // run.job.virtual_shards), len(train_set))
    loading = Loading(train_set, num_workers=run.job.data.loader_workers)
    ((batch,),) = run.reader.contents(loading, 0, [SampleRequest((np.arange(num_samples),))], train=False)
    return as_pair(batch)[0]


def data_facts(dataset: Any) -> dict[str, Any]:
    """Facts about the data set that a model is built from."""
    if isinstance(dataset, ArraySet):
        shape = dataset.inputs.shape
        if dataset.mean is None:
            return {"vocab_size": dataset.num_classes, "context": shape[1]}
        return {"num_classes": dataset.num_classes, "in_channels": shape[1], "image_size": shape[2]}
    classes = getattr(dataset, "classes", None)
    return {} if classes is None else {"num_classes": len(classes)}


# --- the loss and metrics of the reference recipes: cross-entropy of classes or of next tokens ---


def training_loss(optim: OptimSpec) -> Callable[[nn.Module, Any], Tensor]:
    """Mean cross-entropy over samples; over their tokens too for logits of shape (batch, tokens, classes)."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits, targets = _logits(model, batch)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=optim.label_smoothing)

    return loss


def accuracy_and_loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Accuracy and cross-entropy of every sample, each the mean over the sample's tokens if it has several."""
    logits, targets = _logits(model, batch)
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    correct = (logits.argmax(-1) == targets).to(torch.float64)
    return {"accuracy": correct.view(len(correct), -1).mean(1), "loss": losses.view(len(losses), -1).mean(1)}


def as_pair(sample: Any) -> tuple[Any, Any]:
    """A sample, or a batch of them, as (input, target). Raises `ModelError` for another one."""
    try:
        inputs, targets = [] if isinstance(sample, Mapping) else sample
    except (TypeError, ValueError):
        raise ModelError(
            "paceline train needs samples that are pairs (input, target); for others write a script with paceline.init."
        ) from None
    return inputs, targets


def _logits(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = as_pair(batch)
    logits = model(inputs)
    return (logits if logits.dtype == torch.float64 else logits.float()), targets
