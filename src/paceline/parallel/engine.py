"""The contract between a training step and an engine, which trains a model together with other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.parallel.assignment import Assignment
from paceline.parallel.buffers import Buffers
from paceline.parallel.clock import Mark, mark
from paceline.parallel.companions import ALONE, Companions
from paceline.parallel.gradients.buckets import buckets
from paceline.parallel.gradients.gradient_norms import TakeNorms, norm_of_each, norm_of_norms
from paceline.parallel.losses import LossLayouts, LossOf, StepLoss
from paceline.process_groups import device_of
from paceline.samples import Samples
from paceline.spec import AlgorithmName


@dataclass(frozen=True)
class StepInput:
    """The input of one worker for one training step."""

    assignment: Assignment
    batch: Samples
    """This worker's samples in order; one stand-in sample if it has none."""
    loss_of: LossOf
    """The loss of a batch, as `losses.Loss` says."""
    shard_seed: Callable[[int], int]
    """The seed of torch's, NumPy's and Python's generators for the forward pass of a virtual shard."""
    scale: Callable[[Tensor], Tensor]
    """Applies the loss scale just before backward."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context of a forward pass (autocast) that `loss_of` does not run itself."""
    is_low_precision: bool = False
    """Whether forward passes compute in bfloat16 or float16."""
    take_norms: TakeNorms | None = None
    """Called with the norms of the step's gradients if the engine knows them, in this step or the next."""
    loss_name: str = "loss"
    """Names the loss function: it returns the same numbers in all steps with this name."""
    companions: Companions = ALONE
    """The other models that the loss function may call."""
    any_shard: AnyShard | None = None
    """Input for an engine that does not compute this worker's own assignment."""


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


Update = Callable[[Tensor], None]
"""Called with the loss when the gradient is in `.grad` of every parameter: makes the optimizer's step."""


AS_RANK = "as_rank"
"""In a worker's own state: the rank of the worker that has the same, and saves it."""


class Engine:
    """Trains a model together with the other workers, one global batch at a time.

    The defaults suit an engine whose workers each hold the whole model, equal after every step.
    """

    buffers: Buffers
    """The buffers that forward passes change."""
    algorithm: AlgorithmName | None = None
    """How gradients are summed, where that was chosen here; None: as the plan says."""
    notes: Sequence[str] = ()
    """Notes for the run's log and report."""
    reads_assignment = True
    """Whether a worker computes the samples assigned to it. If not, they need not be read: see `AnyShard`."""
    holds_all = True
    """Whether every worker holds the whole model and its optimizer."""

    def __init__(self, module: nn.Module, device: torch.device, layouts: LossLayouts) -> None:
        """
        Args:
            module: the model as the loss function calls it.
            layouts: which numbers loss functions return.
        """
        self.module = module
        self.layouts = layouts
        self._device = device
        now = mark(device)
        self.communication: tuple[Mark, Mark] = now, now
        """The interval of the last step's exposed communication: last gradient computed to last gradient aggregated."""

    def close(self, error: BaseException | None = None) -> None:
        """End what runs in the background.

        Args:
            error: the error that ends the run; None: none does.
        """

    # --- a step ---

    def step(self, step: StepInput, update: Update) -> StepLoss:
        """Train on one global batch; return its loss, the same on every worker.

        An engine whose workers synchronise less often, or whose updates are made elsewhere, overrides this; by default
        it computes `gradients` and calls `update` once.
        """
        result = self.gradients(step)
        update(result.loss)
        return result

    def gradients(self, step: StepInput) -> StepLoss:
        """Store the gradient of the global batch's loss in `.grad` of every parameter (None before); return that
        loss."""
        raise NotImplementedError

    def audit(self, step: StepInput) -> None:
        """Raise `ModelError` if the loss of the same samples differs between workers or from call to call, between
        `gradients` and the update; a collective, and nothing where the engine has no way to compare (`audit.py`)."""

    @property
    def is_synchronised(self) -> bool:
        """Whether the last step synchronised all workers, so that they can exchange their status."""
        return True

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient, a scalar; a collective if workers do not hold all of it."""
        return norm_of_norms(self.gradient_norms())

    def gradient_norms(self) -> list[Tensor]:
        """Norms of parts of the whole model's gradient, scalars; their own norm is that of all of it. A collective if
        workers do not hold all of it."""
        return norm_of_each([p.grad for p in self.module.parameters() if p.grad is not None])

    # --- the whole model ---

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All parameters, or tensors sharded like them, of the whole model by name, in full; a collective.

        If workers do not hold the whole model, rank 0 gets them, in CPU memory, and the others get nothing.
        """
        return dict(tensors)

    # --- workers that differ ---

    @property
    def weights_diverge(self) -> bool:
        """Whether workers' weights and optimizers differ between two synchronisations."""
        return False

    @property
    def changes_state(self) -> bool:
        """Whether a step changes more than buffers before its update, so that one which fails half-way leaves a
        mixture."""
        return False

    def sync_buffers(self) -> bool:
        """Broadcast rank 0's buffers where they differ; returns whether all weights are equal now. A
        collective, after a step."""
        return True

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """A context in which all workers hold the same model, to evaluate or save. A collective.

        Training continues from its previous state, except that buffers that differ become rank 0's.
        """
        self.sync_buffers()
        yield

    # --- checkpoints ---

    def shared_state(self) -> dict[str, Any]:
        """The engine's state besides model and optimizer that is the same on all workers."""
        hidden = self.buffers.hidden_state()
        return {"hidden_buffers": hidden} if hidden else {}

    def model_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the model: what all workers have, or agree on."""
        return self.module.state_dict()

    def own_state(self) -> dict[str, Any]:
        """The engine's state of this worker: "sums", tensors that count by their sum over workers, and "means"."""
        return {}

    def load_state(self, shared: dict[str, Any], own: dict[str, Any]) -> None:  # noqa: ARG002 - most have none
        """Restore saved states, empty if nothing was saved; the model has its weights already."""
        self.buffers.load_hidden_state(shared.get("hidden_buffers", {}))


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Broadcast rank 0's values to all workers, in messages of about a bucket; a collective.

    Tensors may be on any device: a model that no GPU can hold is still in host memory when it is made equal.
    """
    if group is None:
        return
    device = device_of(group)
    for bucket in buckets((tensor.detach() for tensor in tensors), lambda tensor: (tensor.dtype, tensor.nbytes)):
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in bucket])
        dist.broadcast(flat, group_src=0, group=group)
        for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def statistics_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which losses, and what moves buffers, are added: float64 for float64 models, else float32."""
    is_double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    return torch.float64 if is_double else torch.float32
