"""What a step needs of parallelism: one seam, and an implementation for each way of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from paceline.errors import ModelError
from paceline.parallel.assignment import Assignment
from paceline.parallel.clock import Mark
from paceline.parallel.gradient_norms import TakeNorms


@dataclass(frozen=True)
class StepInput:
    """One worker's part of one training step."""

    share: Assignment
    batch: Any
    """This worker's samples in order; one stand-in sample if its share is empty."""
    loss_of: Callable[[nn.Module, Any], Tensor]
    """The mean loss over the samples of a batch."""
    seed_shard: Callable[[int], None]
    """Sets torch's generators to where they belong before the given shard is computed."""
    scale: Callable[[Tensor], Tensor]
    """Applies the loss scale just before backward."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What a forward pass runs in (autocast), where it is not `loss_of` that runs it."""
    take_norms: TakeNorms | None = None
    """Told the norms of the step's gradients where parts of them are computed one by one: in this step or the next."""
    any_shard: AnyShard | None = None
    """For an engine that does not compute this worker's own assignment."""


@dataclass(frozen=True)
class AnyShard:
    """How to compute any virtual shard of the run, and where all workers rest. Global batches are counted from the
    beginning of the run."""

    batch: int
    """The global batch of this step."""
    num_shards: Callable[[int], int]
    """Virtual shards of a global batch that are not empty."""
    lr_factor: Callable[[int], float]
    """The factor on the optimizer's base learning rates for the update by a global batch."""
    read: Callable[[int, int], StepInput]
    """read(batch, shard): the step of a worker whose whole assignment is this shard."""
    at_base_rates: Callable[[], AbstractContextManager[Optimizer]]
    """Inside, the optimizer has its base learning rates."""
    stop: int
    """All workers rest when this many updates have been made: an epoch ends, or a checkpoint is due."""
    wants_rest: Callable[[], bool]
    """Whether this worker asks all to rest now."""
    at_rest: Callable[[], None]
    """To be called when all workers rest and before they go on: they exchange their status and may save. A
    collective."""


Update = Callable[[Tensor], None]
"""Called with the mean loss when the gradient is in `.grad` of every parameter: makes the optimizer's step."""


class Engine(Protocol):
    """Trains a model together with the other workers, one global batch after the other."""

    module: nn.Module
    """What the forward pass goes through."""

    def step(self, step: StepInput, update: Update) -> Tensor:
        """Train on one global batch; return its mean loss, a detached scalar, the same on every worker.

        An engine leaves the gradient of that mean loss in `.grad` of every parameter and calls `update` once. One
        whose workers synchronise less often, or whose updates are made elsewhere, says here what it does instead.
        """
        ...

    @property
    def reads_assignment(self) -> bool:
        """Whether a worker computes the samples assigned to it. Else nobody has to read them: see `AnyShard`."""
        ...

    @property
    def is_synchronised(self) -> bool:
        """Whether all workers have come to one point after the last step, where they can exchange their status."""
        ...

    def consensus(self) -> AbstractContextManager[None]:
        """Inside, parameters and buffers are what the workers agree on, the same on every one: to evaluate or save.

        A common act of all workers. Nothing that training goes on with is changed, but for buffers that workers do not
        keep equal while they train: those become rank 0's.
        """
        ...

    @property
    def weights_diverge(self) -> bool:
        """Whether workers' weights and optimizers differ between two meetings."""
        ...

    @property
    def holds_all(self) -> bool:
        """Whether every worker holds the whole model and its optimizer, and no part of it is elsewhere only."""
        ...

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient, a scalar; a common act where a worker does not hold it all."""
        ...

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of parameters, or what belongs to them, all of the model's by name and in one piece. A common act.

        Where the model is spread they are in the host memory of rank 0; others get nothing.
        """
        ...

    @property
    def changes_buffers(self) -> bool:
        """Whether a forward pass may change buffers, so that a step which fails in the middle leaves a mixture."""
        ...

    def sync_buffers(self) -> bool:
        """Make rank 0's buffers everybody's, where workers do not keep them equal; whether all weights are equal now.

        A common act of all workers, after a step: what is saved then is the same whoever saves it.
        """
        ...

    def shared_state(self) -> dict[str, Any]:
        """What the engine remembers besides model and optimizer, alike on all workers that have settled."""
        ...

    def own_state(self) -> dict[str, Any]:
        """What this worker alone remembers: under "sums" what counts by its sum over all, under "means" by its mean."""
        ...

    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:
        """Go on from there, the model having its weights already; empty where nothing was saved."""
        ...

    @property
    def communication(self) -> tuple[Mark, Mark]:
        """The last step's exposed communication: from the last gradient computed to the last one aggregated."""
        ...


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Rank 0's values for everybody."""
    if group is not None:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), group_src=0, group=group)


def check_batch(batch: Any, num_samples: int) -> None:
    """A `ModelError` if `batch` cannot be cut into shards: a tensor in it has not one row for each sample."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) != num_samples:
            raise ModelError(
                f"The batch given to run.step has a tensor of shape {tuple(leaf.shape)} for {num_samples} samples; "
                "each tensor in it needs one row for every sample that run.batches yielded, in their order."
            )


def cut(batch: Any, start: int, stop: int) -> Any:
    """Samples start … stop - 1 of a batch: every tensor in it, however nested, along its first dimension."""

    def part(leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf

    return pytree.tree_map(part, batch)


def check_loss(loss: Any) -> Tensor:
    """`loss` if it is a scalar that can be differentiated; else a `ModelError`."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(
            f"The loss function returned {shape}; it should return one number, the mean loss over its samples."
        )
    if not loss.requires_grad:
        raise ModelError("The loss does not depend on any trainable parameter of the prepared model.")
    return loss.view(())


def statistics_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which losses and norm statistics are added: float64 for float64 models, else float32."""
    kinds = {p.dtype for p in model.parameters()}
    return torch.float64 if torch.float64 in kinds else torch.float32


class HoldsAll:
    """The part of an `Engine` that is the same wherever every worker holds the whole model."""

    module: nn.Module
    holds_all = True

    def gradient_norm(self) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)


class EqualAfterEveryStep:
    """The part of an `Engine` that is the same wherever equal gradients make equal weights in every step."""

    reads_assignment = True
    is_synchronised = True
    weights_diverge = False

    def gradients(self, step: StepInput) -> Tensor:
        """Leave the gradient in `.grad` of every parameter; return the global batch's mean loss, detached."""
        raise NotImplementedError

    def step(self, step: StepInput, update: Update) -> Tensor:
        loss = self.gradients(step)
        update(loss)
        return loss

    def sync_buffers(self) -> bool:
        raise NotImplementedError

    @contextmanager
    def consensus(self) -> Iterator[None]:
        self.sync_buffers()
        yield


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's model, under what spreads it."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
