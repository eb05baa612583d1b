"""What one worker is given for one training step, and the other models that the step may call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.batch import Batch
from paceline.containers import copied
from paceline.parallel.assignment import Assignment
from paceline.parallel.buffers import Buffers, standing_in
from paceline.parallel.dtensor import reshard
from paceline.parallel.gradient_norms import TakeNorms
from paceline.parallel.losses import LossOf


@dataclass(frozen=True)
class Companion:
    """Another model of a run, which a loss function may call beside the one that a step trains.

    A step changes the model that it trains and no other. The others compute with the weights and buffers that they
    have: gradients flow through them and not into them, and a buffer that a forward pass of theirs changes is put back.
    """

    model: nn.Module
    buffers: Buffers
    """Those of the engine that trains the model, if steps of its own do."""


@dataclass(frozen=True)
class Companions:
    """The companions of one step."""

    models: Sequence[Companion] = ()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context for a step that trains another model; these models are afterwards as before."""
        self._reshard()
        trained = [p for one in self.models for p in one.model.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            with self.untouched():
                yield
        finally:
            self._reshard()  # whole parameters would stay frozen, or keep a gradient, in the next step of their own
            for parameter in trained:
                parameter.requires_grad_(True)
                parameter.grad = None  # of a graph that began before the step

    def _reshard(self) -> None:
        """Leave workers their shards of the parameters that they have gathered."""
        for one in self.models:
            reshard(one.model)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """A context after which all buffers are as before it."""
        with ExitStack() as stack:
            for one in self.models:
                stack.enter_context(one.buffers.untouched())
            yield

    def begin_pass(self) -> None:
        """Give the models the buffers of the step."""
        for one in self.models:
            one.buffers.begin_pass()

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """A context for a stand-in sample, which batch norm layers do not normalise over."""
        with ExitStack() as stack:
            for one in self.models:
                stack.enter_context(standing_in(one.model))
            self.begin_pass()
            yield


@dataclass(frozen=True)
class StepInput:
    """The input of one worker for one training step."""

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
    companions: Companions = Companions()
    """The other models that the loss function may call."""
    any_shard: AnyShard | None = None
    """Input for an engine that does not compute this worker's own assignment."""

    def content(self, shard: int) -> Any:
        """The samples of a shard of this worker's, for the loss function."""
        content = self.batch.shards[shard - self.assignment.own[0]]
        return copied(content) if self.reads_again else content


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
