"""Where the parameters of a model live: whole on every worker, which is this file, or spread over a mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.step_input import Assignment
from paceline.tensors import local_shard


class Layout:
    """How workers hold a model: each the whole of it, equal after every step; see `SpreadLayout`."""

    holds_all = True
    blocks: Mapping[str, nn.Module] | None = None
    """This worker's blocks, by path in the whole model, where it holds some of them only."""
    late_parameters: Collection[str] = ()
    """Names of parameters whose gradients change after the last backward pass."""
    notes: Sequence[str] = ()
    """Notes for the run's log and report."""
    measures_first_pass = True
    """Whether the whole gradient of a first pass is in `.grad` after it."""
    num_in_replica = 1
    """The workers of a replica that have samples of their own: neighbours, as an assignment counts ranks."""
    num_copies = 1
    """The workers of a replica that have the same samples."""
    knows_losses = True
    """Whether this worker computes losses, and not only stages before the last one."""

    def __init__(self, module: nn.Module, device: torch.device, world: dist.ProcessGroup | None) -> None:
        """
        Args:
            module: what this worker holds, as the loss function calls it.
            world: the workers that train the model together; None: this one alone.
        """
        self.module = module
        self.device = device
        self.world = world
        self.data = world
        """The workers among which the batch is divided; None: this one computes all of it."""
        self.replicas = world
        """The workers that hold the same parameters, and sum their gradients; None: this one alone, or others do."""
        self.zero = torch.zeros((), dtype=statistics_dtype(module), device=device)
        """A scalar of the dtype, and on the device, in which losses and norms are added."""

    def num_passes(self, assignment: Assignment) -> int:
        """How many passes this worker makes in a step, its own shards and stand-ins."""
        start, stop = assignment.own
        return stop - start

    def begin_pass(self, stage: nn.Module, *, is_last: bool, is_own: bool = True) -> None:
        """Before a backward pass through these layers; `is_last`: of this step; `is_own`: of a shard of this worker,
        not of a stand-in."""

    def end_passes(self) -> None:
        """After the step's last backward pass, before replicas have added their gradients up."""

    def local_squares(self, named: Iterable[tuple[str, Tensor]]) -> Tensor:
        """This worker's part of the squared norm of its replica's gradient in `.grad` of these parameters, a scalar."""
        return squared_norm([p.grad for _, p in named if p.grad is not None], self.zero)

    def sum_in_replica(self, values: Tensor) -> Tensor:
        """The sums of numbers, 1-D, over the workers of this worker's replica; a collective if there are several."""
        return values

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient, a scalar; a collective if workers do not hold all of it."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if not all(one.dtype == self.zero.dtype for one in gradients):
            gradients = [norm_of(one).to(self.zero) for one in gradients]
        return torch.nn.utils.get_total_norm(gradients) if gradients else self.zero

    def complete(self, losses: Tensor) -> Tensor:
        """The sums of losses, zeros where `knows_losses` is not set; a collective if other workers know them."""
        return losses

    def whole(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """All parameters, or tensors sharded like them, of the whole model by name, in full; a collective. What is no
        tensor stays as it is.

        If workers do not hold the whole model, rank 0 gets them, in CPU memory, and the others get nothing.
        """
        return dict(tensors)

    def norms_of_all(self, norms: Mapping[str, Tensor]) -> Tensor:
        """Norms of parameters' gradients, by name, as one vector: 0 for those that have none."""
        every = [norms.get(name, self.zero) for name, _ in self.module.named_parameters()]
        return torch.stack([norm.to(self.zero) for norm in every] or [self.zero])

    # --- gradients of one shard, for sums in a fixed order ---

    def take_gradients(self, named: Mapping[str, Tensor]) -> list[Tensor | None]:
        """The whole gradients of these parameters that a pass has left in the model, which has none of them then."""
        found = [parameter.grad for parameter in named.values()]
        for parameter in named.values():
            parameter.grad = None
        return found

    def keep_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Leave what this worker needs of a whole gradient in `.grad`."""
        parameter.grad = gradient.to(parameter.dtype)


def sum_over(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over a group's workers, in the place of `values`."""
    dist.all_reduce(values, group=group)
    return values


def count_users(counts: Tensor, are_used: Sequence[bool]) -> None:
    """Fill a vector with 1 for each gradient that is used, and 0 for the others."""
    counts.fill_(1)
    for number, is_used in enumerate(are_used):
        if not is_used:  # one by one: most often all are used, and nothing is copied to the device
            counts[number] = 0


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model is on the meta device (shapes without values)."""
    return any(parameter.is_meta for parameter in model.parameters())


def statistics_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which losses, and what moves buffers, are added: float64 for models with float64 parameters or
    buffers, else float32."""
    is_double = any(one.dtype == torch.float64 for one in (*model.parameters(), *model.buffers()))
    return torch.float64 if is_double else torch.float32


# --- norms ---


# In float32 a sum over many millions of squares falls short by 0.3 %, which a small difference of norms cannot bear.
_CHUNK = 1 << 20


def squared_norm(tensors: Iterable[Tensor], like: Tensor) -> Tensor:
    """The sum of all squares, a scalar at least in float32, on the device of `like`; 0 without tensors."""
    sums = [like.float() if like.dtype != torch.float64 else like]
    for tensor in tensors:
        # In the order of memory: where that is another one, as of convolutions in channels_last, no copy is made.
        flat = tensor.detach().permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).reshape(-1)
        wide = flat if flat.dtype == torch.float64 else flat.float()
        sums += [torch.dot(chunk, chunk).to(sums[0]) for chunk in wide.split(_CHUNK)]
    return torch.stack(sums).sum()


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of a gradient of any shape, a scalar; at least in float32."""
    is_wide = gradient.dtype in (torch.float32, torch.float64)
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=None if is_wide else torch.float32)
    return norm


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients down so that the norm of the whole model's gradient, now `norm`, is at most `max_norm`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as in torch's clip_grad_norm_
    for parameter in parameters:
        if parameter.grad is not None:
            mine = local_shard(parameter.grad)
            mine.mul_(factor.to(mine.device, mine.dtype))
