"""Where the parameters of a model live: whole on every worker, or spread over a mesh."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.dtensor_type import is_dtensor, local_shard
from paceline.object_collectives import gather_objects
from paceline.parallel.assignment import Assignment
from paceline.parallel.axes import Axes
from paceline.parallel.dtensor import full_tensor, is_sharded, reshard, shard_like
from paceline.parallel.gradient_norms import norm_of, squared_norm
from paceline.parallel.sharded import sharded_modules

if TYPE_CHECKING:
    from paceline.parallel.stages import Pipeline


class Whole:
    """Every worker holds the whole model, equal after every step."""

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
    """The workers of a replica that have samples of their own."""
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

    def ranks_of_replicas(self, assignment: Assignment) -> list[list[int]]:
        """The ranks, as `assignment` counts them, that compute one gradient together before replicas add theirs up."""
        return [[rank] for rank in range(len(assignment.shards_of_rank))]

    def begin_pass(self, stage: nn.Module, *, is_last: bool) -> None:
        """Before a backward pass through these layers; `is_last`: of this step."""

    def end_passes(self) -> None:
        """After the step's last backward pass, before replicas have added their gradients up."""

    def local_squares(self) -> Tensor:
        """This worker's part of the squared norm of its replica's gradient in `.grad`, a scalar."""
        return squared_norm([p.grad for p in self.module.parameters() if p.grad is not None], self.zero)

    def sum_in_replica(self, values: Tensor) -> Tensor:
        """The sums of numbers, 1-D, over the workers of this worker's replica; a collective if there are several."""
        return values

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient, a scalar; a collective if workers do not hold all of it."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if not all(one.dtype == self.zero.dtype and not one.is_sparse for one in gradients):
            gradients = [norm_of(one).to(self.zero) for one in gradients]
        return torch.nn.utils.get_total_norm(gradients) if gradients else self.zero

    def complete(self, losses: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of losses, and of what buffers moved by, on workers that do not know all of them; a collective."""
        return losses, moves

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All parameters, or tensors sharded like them, of the whole model by name, in full; a collective.

        If workers do not hold the whole model, rank 0 gets them, in CPU memory, and the others get nothing.
        """
        return dict(tensors)

    def norms_of_all(self, norms: Mapping[str, Tensor]) -> Tensor:
        """Norms of parameters' gradients, by name, as one vector: 0 for those that have none."""
        every = [norms.get(name, self.zero) for name, _ in self.module.named_parameters()]
        return torch.stack([norm.to(self.zero) for norm in every] or [self.zero])

    # --- gradients of one shard, for sums in a fixed order ---

    def form(self, parameter: Tensor) -> Tensor:
        """A tensor of the shape of the parameter's whole gradient, and of its order in memory."""
        return parameter

    def take_gradients(self, named: Mapping[str, Tensor]) -> list[Tensor | None]:
        """The whole gradients of these parameters that a pass has left in the model, which has none of them then."""
        found = [parameter.grad for parameter in named.values()]
        for parameter in named.values():
            parameter.grad = None
        return found

    def keep_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Leave what this worker needs of a whole gradient in `.grad`."""
        parameter.grad = gradient.to(parameter.dtype)


class Spread(Whole):
    """The model is spread over a mesh: cut into stages, its layers sharded over tp, its parameters over fsdp.

    All workers of an fsdp axis go through the same collectives in every pass, so one with fewer shards than others
    computes stand-in samples that count for nothing.
    """

    holds_all = False

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        axes: Axes,
        zero: Tensor,
        pipeline: Pipeline | None,
        *,
        may_skip: bool,
        notes: Sequence[str],
    ) -> None:
        """
        Args:
            zero: as the attribute; of the whole model: a stage may have no parameter.
            may_skip: whether some parameters get no gradient in some steps, on some workers.
        """
        super().__init__(module, device, axes.world)
        self.data = axes.data
        self.replicas = axes.dp
        self.zero = zero
        self.axes = axes
        self.num_in_replica, self.num_copies = axes.mesh.fsdp, axes.mesh.tp * axes.mesh.pp
        self.notes = notes
        self._pipeline = pipeline
        if pipeline is not None:
            self.blocks, self.late_parameters = pipeline.blocks, pipeline.shared_parameters.keys()
        self.knows_losses = pipeline is None or pipeline.has_last_stage
        self._may_skip = may_skip
        self.measures_first_pass = axes.pp is None and (axes.mesh.fsdp == 1 or axes.mesh.zero_stage > 1)
        self._keeps_whole_gradients = False
        module.register_forward_hook(self._after_evaluation)

    def _after_evaluation(self, module: nn.Module, _arguments: Any, _output: Any) -> None:
        # No backward pass follows that would free the gathered parameters, and what comes next reads the shards.
        if not torch.is_grad_enabled():
            reshard(module)

    def num_passes(self, assignment: Assignment) -> int:
        if self.axes.mesh.fsdp == 1:
            return super().num_passes(assignment)
        return max(stop - start for start, stop in assignment.shards_of_rank)

    def ranks_of_replicas(self, assignment: Assignment) -> list[list[int]]:
        degree = self.axes.mesh.fsdp
        return [list(range(first, first + degree)) for first in range(0, len(assignment.shards_of_rank), degree)]

    def begin_pass(self, stage: nn.Module, *, is_last: bool) -> None:
        # ZeRO 1 adds gradients up once a step, 2 and 3 after every pass.
        if self.axes.mesh.zero_stage == 1 and not self._keeps_whole_gradients:
            for sharded in sharded_modules(stage):
                sharded.set_requires_gradient_sync(is_last, recurse=False)
                sharded.set_reshard_after_backward(is_last, recurse=False)

    def end_passes(self) -> None:
        if self._keeps_whole_gradients:
            reshard(self.module)
            return
        if self._may_skip and self.axes.mesh.fsdp > 1:
            self._forget_unused()
        # Parameters without dimensions are not sharded along fsdp: their gradients are added up here.
        if self.axes.mesh.fsdp > 1:
            whole = [p.grad for p in self.module.parameters() if p.dim() == 0 and p.grad is not None]
            if whole:
                total = torch.stack([local_shard(grad) for grad in whole])
                dist.all_reduce(total, group=self.axes.device_mesh.get_group("fsdp"))
                for grad, summed in zip(whole, total.unbind(), strict=True):
                    local_shard(grad).copy_(summed)

    def _forget_unused(self) -> None:
        """Leave no gradient of parameters that no worker has used: fsdp has added them up all the same, as zeros."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        are_used = [p.grad is not None and local_shard(p.grad).any() for p in trained]
        known = torch.stack([self.zero + one for one in are_used])
        if self.data is not None:
            dist.all_reduce(known, group=self.data)
        for parameter, is_used in zip(trained, known.tolist(), strict=True):
            if not is_used:
                parameter.grad = None

    def local_squares(self) -> Tensor:
        total = self.zero
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                own = squared_norm([local_shard(parameter.grad)], self.zero.to(parameter.grad.device))
                total = total + own.to(total) / self._num_copies_of(name, parameter)
        return total

    def sum_in_replica(self, values: Tensor) -> Tensor:
        mesh = self.axes.mesh
        of_replicas = values.new_zeros(mesh.dp, len(values))
        own = of_replicas[mesh.place(dist.get_rank(self.world))["dp"]]
        own.copy_(values)
        dist.all_reduce(of_replicas, group=self.world)
        return own

    def complete(self, losses: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
        if self.axes.pp is None:
            return losses, moves
        # Only the last stage knows the loss; and buffers of all stages move, or none.
        known = torch.cat([losses, moves.sum().view(1) * 0])
        losses, poison = sum_over(known, self.axes.pp).split([len(losses), 1])
        return losses, moves + poison

    def norms_of_all(self, norms: Mapping[str, Tensor]) -> Tensor:
        if self._pipeline is None:
            return super().norms_of_all(norms)
        every = self.zero.new_zeros(self._pipeline.num_parameters)
        for name, norm in norms.items():
            every[self._pipeline.places[name]] = norm
        assert self.axes.pp is not None
        return sum_over(every, self.axes.pp)  # each is 0 on all workers but one

    def _num_copies_of(self, name: str, parameter: Tensor) -> int:
        """How many workers of a replica hold the same shard of a parameter."""
        mesh = self.axes.mesh
        sharded = {axis: is_sharded(parameter, axis) for axis in ("fsdp", "tp")}
        num_stages = 1 if self._pipeline is None else len(self._pipeline.shared_parameters.get(name, (0,)))
        return (1 if sharded["fsdp"] else mesh.fsdp) * (1 if sharded["tp"] else mesh.tp) * num_stages

    def gradient_norm(self) -> Tensor:
        return self.sum_in_replica(self.local_squares().view(1)).sqrt().view(())

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered: dict[Tensor, Tensor] = {}  # tied ones stay tied
        found: dict[str, Tensor] = {}
        rank = dist.get_rank(self.world)
        place = self.axes.mesh.place(rank)
        keeps = place["dp"] == place["fsdp"] == place["tp"] == 0
        for name, tensor in tensors.items():
            if tensor not in gathered:
                all_of_it = full_tensor(tensor)
                gathered[tensor] = all_of_it.cpu() if keeps else all_of_it.new_empty(0)
            found[name] = gathered[tensor]
        if self.axes.pp is not None:
            stages = gather_objects(found, self.axes.pp)
            found = {name: tensor for stage in stages or [] for name, tensor in stage.items()}
        return found if rank == 0 else {}

    # --- gradients of one shard ---

    def keep_whole_gradients(self) -> None:
        """Have every pass leave whole gradients in `.grad`, for sums in a fixed order."""
        self._keeps_whole_gradients = True
        for sharded in sharded_modules(self.module):
            sharded.set_requires_gradient_sync(False, recurse=False)
            sharded.set_reshard_after_backward(False, recurse=False)  # whole gradients are with whole parameters

    def form(self, parameter: Tensor) -> Tensor:
        return torch.empty_strided(parameter.shape, parameter.stride(), device="meta")

    def take_gradients(self, named: Mapping[str, Tensor]) -> list[Tensor | None]:
        # The gathered parameters, which modules hold until they are sharded again, have the gradients.
        gathered = dict(self.module.named_parameters())
        found = [gathered[name].grad for name in named]
        for parameter in gathered.values():
            parameter.grad = None
        if self.axes.mesh.zero_stage > 1:
            reshard(self.module)
        return found

    def keep_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        # A copy: a view would keep all gradients in memory.
        parameter.grad = shard_like(gradient, parameter).to(parameter.dtype, copy=not is_dtensor(parameter))


def sum_over(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over a group's workers, in the place of `values`."""
    dist.all_reduce(values, group=group)
    return values


def statistics_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which losses, and what moves buffers, are added: float64 for float64 models, else float32."""
    is_double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    return torch.float64 if is_double else torch.float32
