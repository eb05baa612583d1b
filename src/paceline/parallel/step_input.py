"""What one worker is given for one training step: virtual shards, which are the fixed subdivision of every global
batch, and how to compute them.

The shards depend on the batch alone. A worker takes neighbouring shards, so more workers means fewer shards each,
never other shards.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline import env
from paceline.parallel.dtensor import reshard
from paceline.parallel.losses import LossOf
from paceline.parallel.pass_state import Buffers, preserved
from paceline.tensors import Batch, map_tensors


def shard_sizes(num_samples: int, num_shards: int) -> tuple[int, ...]:
    """Number of samples in each non-empty shard: as even as possible, larger shards first."""
    small, extra = divmod(num_samples, num_shards)
    return tuple(small + (shard < extra) for shard in range(min(num_shards, num_samples)))


@functools.cache
def shards_of_rank(rank: int, world_size: int, num_shards: int) -> tuple[int, int]:
    """The shards start … stop - 1 of `rank`; the number of shards per rank differs by at most one.

    Where `paceline verify` asks for it, the first worker has one more and the last one fewer.
    """
    shift = 1 if num_shards >= 2 * world_size and env.text(env.UNEVEN_DEAL) else 0
    bounds = [number * num_shards // world_size + shift * (0 < number < world_size) for number in (rank, rank + 1)]
    return bounds[0], bounds[1]


@dataclass(frozen=True)
class Assignment:
    """The virtual shards that one worker computes of one global batch."""

    shard_sizes: tuple[int, ...]
    """Number of samples in every non-empty shard of the global batch."""
    shards_of_rank: tuple[tuple[int, int], ...]
    """The non-empty shards start … stop - 1 of every rank."""
    rank: int

    @classmethod
    def of(cls, num_samples: int, num_shards: int, rank: int, world_size: int) -> Assignment:
        """The assignment of a global batch of `num_samples`; one of fewer samples than shards has fewer shards."""
        return cls.of_sizes(shard_sizes(num_samples, num_shards), num_shards, rank, world_size)

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], num_shards: int, rank: int, world_size: int) -> Assignment:
        """The assignment of shards of these sizes; empty ones are left out, and the others numbered without gaps."""
        num_before = list(itertools.accumulate((size > 0 for size in sizes), initial=0))
        num_before += [num_before[-1]] * (num_shards + 1 - len(num_before))
        of_ranks = (shards_of_rank(one, world_size, num_shards) for one in range(world_size))
        own = tuple((num_before[start], num_before[stop]) for start, stop in of_ranks)
        return cls(tuple(size for size in sizes if size > 0), own, rank)

    @property
    def global_size(self) -> int:
        return sum(self.shard_sizes)

    @property
    def own(self) -> tuple[int, int]:
        """This worker's shards, start … stop - 1."""
        return self.shards_of_rank[self.rank]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples in each of this worker's shards; empty for a worker without samples in this step."""
        return self.shard_sizes[slice(*self.own)]

    @property
    def span(self) -> tuple[int, int]:
        """Positions start … stop - 1 of this worker's samples in the global batch."""
        start = sum(self.shard_sizes[: self.own[0]])
        return start, start + sum(self.sizes)

    def weight(self, shard: int) -> float:
        """The part of the global batch that a shard is."""
        return self.shard_sizes[shard] / self.global_size


Companions = Sequence[Buffers]
"""Other models of a run, which a loss function may call beside the one that a step trains, each by its buffers.

A step changes the model that it trains and no other. The others compute with the weights and buffers that they have:
gradients flow through them and not into them, and a buffer that a forward pass of theirs changes is put back.
"""


@contextmanager
def frozen_models(companions: Companions) -> Iterator[None]:
    """A context for a step that trains another model; these models are afterwards as before."""
    models = [one.model for one in companions]
    for model in models:
        reshard(model)
    trained = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        with preserved(*companions):
            yield
    finally:
        for model in models:
            reshard(model)  # whole parameters would stay frozen, or keep a gradient, in the next step of their own
        for parameter in trained:
            parameter.requires_grad_(True)
            parameter.grad = None  # of a graph that began before the step


@dataclass(frozen=True)
class GradientNorms:
    """Squared norms of one step's gradients over fewer and over more samples; times the squared loss scale, if any."""

    small_sqr: Tensor
    """The mean over parts of the global batch before their gradients are summed, weighted by samples; a scalar."""
    small_batch: float
    """Mean number of samples per part: 1 / (weighted mean of 1 / samples), which is samples / parts."""
    large_sqr: Tensor
    """The squared norm of the gradient of the global batch; a scalar."""
    large_batch: float


TakeNorms = Callable[[GradientNorms], None]


@dataclass(frozen=True)
class StepInput:
    """The input of one worker for one training step."""

    number: int
    """Which global batch of the run it is, from 1."""
    assignment: Assignment
    batch: Batch
    """This worker's shards; one of a stand-in sample if it has none."""
    loss_of: LossOf
    """The loss of a batch, as `losses.Loss` says."""
    shard_seed: Callable[[int], int]
    """The seed of torch's, NumPy's and Python's generators for the forward pass of a virtual shard."""
    scale: Callable[[Tensor], Tensor]
    """Applies the loss scale just before backward."""
    is_low_precision: bool = False
    """Whether forward passes compute in bfloat16 or float16."""
    take_norms: TakeNorms | None = None
    """Called with the norms of the step's gradients, if they can be measured; None: they are not needed."""
    loss_name: str = "loss"
    """Names the loss function: it returns the same numbers in all steps with this name."""
    reads_again: bool = False
    """Whether the samples are needed again after they were given to the loss function, which may change them."""
    companions: Companions = ()
    any_shard: AnyShard | None = None
    """Input for an engine that does not compute this worker's own assignment."""

    def content(self, shard: int) -> Any:
        """The samples of a shard of this worker's, for the loss function."""
        content = self.batch.shards[shard - self.assignment.own[0]]
        return map_tensors(content, Tensor.clone) if self.reads_again else content


@dataclass(frozen=True)
class AnyShard:
    """How to compute any virtual shard of the run, and when all workers pause. Global batches are counted from the
    beginning of the run."""

    batch: int
    """The global batch of this step."""
    num_shards: Callable[[int], int]
    """The number of non-empty virtual shards of a global batch."""
    lr_factor: Callable[[int], float]
    """The factor on the optimizer's base learning rates for the update by a global batch."""
    read: Callable[[int, int], StepInput]
    """read(batch, shard): the step input of a worker whose whole assignment is this shard."""
    at_base_rates: Callable[[], AbstractContextManager[Optimizer]]
    """A context in which the optimizer has its base learning rates."""
    stop: int
    """The number of updates after which all workers pause: an epoch ends, or a checkpoint is due."""
    wants_pause: Callable[[], bool]
    """Whether this worker asks all workers to pause now."""
    on_pause: Callable[[], None]
    """Called when all workers pause, before they continue: they exchange their status and may save. A collective."""
    updated: Callable[[Tensor, bool], None]
    """Called with the loss of this step, and whether it made an update: not if a loss or gradient is not finite."""
