"""What asynchronous parameter servers need of a run: any virtual shard of any global batch, and when to rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from paceline.errors import JobError, ModelError
from paceline.parallel import AnyShard, Assignment, StepInput
from paceline.parallel.assignment import shard_sizes
from paceline.spec import Job
from paceline.train.data_progress import Batch, DataProgress
from paceline.train.schedule import LearningRates, lr_factor
from paceline.train.session import Session


def any_shard(
    job: Job,
    batch: Batch,
    progress: DataProgress,
    rates: LearningRates,
    session: Session,
    read: Callable[[int, Assignment], StepInput],
) -> AnyShard:
    """For the step that trains on `batch`.

    Which samples a global batch has, and what its shards are, is the same function as in synchronous training.

    Args:
        read: from the number of a global batch and an assignment of it to what a worker computes.

    Raises:
        JobError: the run's updates so far are not those by the batches before.
    """
    if batch.index != progress.steps:
        raise JobError(
            f"This run has made {progress.steps} updates, but {batch.index} global batches of "
            f"{job.global_batch_size} come before this one, and asynchronous servers count batches by updates; "
            "train on every batch of every epoch once, with one global_batch_size, or begin in another folder."
        )

    def sizes(index: int) -> tuple[int, ...]:
        return shard_sizes(len(progress.samples(index)), job.virtual_shards)

    def factor(index: int) -> float:
        epoch, number = progress.place(index)
        in_epoch = min(number * job.global_batch_size, batch.samples_per_epoch)
        return lr_factor(job, epoch * batch.samples_per_epoch + in_epoch, batch.samples_per_epoch)

    return AnyShard(
        batch=batch.index,
        num_shards=lambda index: len(sizes(index)),
        lr_factor=factor,
        read=lambda index, shard: read(index, Assignment(sizes(index), ((shard, shard + 1),), rank=0)),
        at_base_rates=rates.at_base,
        stop=int(min(progress.steps + batch.num_left, session.next_save())),
        wants_rest=session.wants_save,
        at_rest=session.at_rest,
    )


def check_unchanged(given: Any, yielded: Any) -> None:
    """A `ModelError` if a script changed a batch between `run.batches` and `run.step`, where shards are read anew."""
    mine, theirs = ([leaf for leaf in pytree.tree_leaves(one) if isinstance(leaf, Tensor)] for one in (given, yielded))
    if len(mine) != len(theirs) or any(one is not other for one, other in zip(mine, theirs, strict=True)):
        raise ModelError(
            "With aggregation.method = 'parameter_server_async' workers read the shards they compute themselves, so "
            "what the script changed in a batch before run.step would be lost; do it in the loss function."
        )
