"""Spreads a model over a mesh: cut into stages, then its layers sharded over tp, then its parameters over fsdp."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.comm.buckets import broadcast
from paceline.errors import JobError, ModelError
from paceline.object_collectives import gather_objects
from paceline.parallel.dtensor import full_tensor, is_sharded, reshard, shard_like
from paceline.parallel.engine import Runner
from paceline.parallel.initial_weights import align, draw
from paceline.parallel.layout import Layout, is_on_meta, squared_norm, statistics_dtype, sum_over
from paceline.parallel.sharded import recompute, shard, sharded_modules
from paceline.parallel.step_input import Assignment
from paceline.parallel.tensor_plan import TensorPlan, apply_tensor_plan, tensor_plan_of
from paceline.spec import Job, Mesh, Plan
from paceline.spec.plan import AXES
from paceline.tensors import is_dtensor, local_shard

if TYPE_CHECKING:
    from paceline.parallel.stages import Pipeline


@dataclass(frozen=True)
class Axes:
    """This worker's groups along a mesh; None on axes of degree 1."""

    mesh: Mesh
    device_mesh: DeviceMesh
    world: dist.ProcessGroup
    data: dist.ProcessGroup | None
    """The dp and fsdp axes together: workers among which the batch is divided."""
    dp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None

    @classmethod
    @functools.cache
    def of(cls, mesh: Mesh, device: torch.device, world: dist.ProcessGroup) -> Self:
        """Open the process groups of a mesh; a collective of all workers. The next run in the process with this mesh
        uses them again: models stay spread over them, and of two equal meshes torch remembers the first."""
        device_mesh = init_device_mesh(device.type, tuple(map(mesh.degree, AXES)), mesh_dim_names=AXES)
        ranks_by_place: dict[tuple[int, int], list[int]] = {}
        for rank in range(mesh.num_workers):
            place = mesh.place(rank)
            ranks_by_place.setdefault((place["pp"], place["tp"]), []).append(rank)
        data = None
        if mesh.num_assignments > 1:
            data, _ = dist.new_subgroups_by_enumeration([*ranks_by_place.values()])
        dp = device_mesh.get_group("dp") if mesh.dp > 1 else None
        return cls(mesh, device_mesh, world, data, dp, device_mesh.get_group("pp") if mesh.pp > 1 else None)


class SpreadLayout(Layout):
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
        self._used: set[str] = set()
        """The names of parameters of which this worker has computed a gradient in this step."""
        self._noted = self._used  # by passes of shards: what a stand-in uses does not count
        if may_skip and axes.mesh.fsdp > 1:
            self._note_used()
        module.register_forward_hook(self._after_evaluation)

    def _note_used(self) -> None:
        """Have passes note which parameters they use: of the others fsdp leaves zeros, as of some that are used."""
        for sharded in sharded_modules(self.module):
            sharded.unshard()
        for name, parameter in self.module.named_parameters():
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # it may be unfrozen later
            parameter.register_post_accumulate_grad_hook(functools.partial(lambda name, _: self._noted.add(name), name))
            parameter.requires_grad_(is_trained)
        reshard(self.module)

    def _after_evaluation(self, module: nn.Module, _arguments: Any, _output: Any) -> None:
        # No backward pass follows that would free the gathered parameters, and what comes next reads the shards.
        if not torch.is_grad_enabled():
            reshard(module)

    def num_passes(self, assignment: Assignment) -> int:
        if self.axes.mesh.fsdp == 1:
            return super().num_passes(assignment)
        return max(stop - start for start, stop in assignment.shards_of_rank)

    def begin_pass(self, stage: nn.Module, *, is_last: bool, is_own: bool = True) -> None:
        self._noted = self._used if is_own else set()
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
        """Leave no gradient of parameters that no worker has used: fsdp has added them up all the same, as zeros. Of
        those that some other worker has used leave one here, too."""
        trained = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        known = self.zero.new_tensor([name in self._used for name in trained])
        self._used.clear()
        if self.data is not None:
            dist.all_reduce(known, group=self.data)
        for parameter, is_used in zip(trained.values(), known.tolist(), strict=True):
            if not is_used:
                parameter.grad = None
            elif parameter.grad is None:  # one without dimensions, which fsdp leaves alone
                parameter.grad = torch.zeros_like(parameter)

    def local_squares(self, named: Iterable[tuple[str, Tensor]]) -> Tensor:
        mesh, total = self.axes.mesh, self.zero
        for name, parameter in named:
            if parameter.grad is not None:
                own = squared_norm([local_shard(parameter.grad)], self.zero.to(parameter.grad.device))
                # So many workers of a replica hold the same shard.
                num_copies = 1 if self._pipeline is None else len(self._pipeline.shared_parameters.get(name, (0,)))
                num_copies *= math.prod(mesh.degree(one) for one in ("fsdp", "tp") if not is_sharded(parameter, one))
                total = total + own.to(total) / num_copies
        return total

    def sum_in_replica(self, values: Tensor) -> Tensor:
        mesh = self.axes.mesh
        of_replicas = values.new_zeros(mesh.dp, len(values))
        own = of_replicas[mesh.place(dist.get_rank(self.world))["dp"]]
        own.copy_(values)
        dist.all_reduce(of_replicas, group=self.world)
        return own

    def complete(self, losses: Tensor) -> Tensor:
        return losses if self.axes.pp is None else sum_over(losses.clone(), self.axes.pp)

    def norms_of_all(self, norms: Mapping[str, Tensor]) -> Tensor:
        if self._pipeline is None:
            return super().norms_of_all(norms)
        places = {name: place for place, name in enumerate(self._pipeline.stages_of)}
        every = self.zero.new_zeros(len(places))
        for name, norm in norms.items():
            every[places[name]] = norm
        assert self.axes.pp is not None
        return sum_over(every, self.axes.pp)  # each is 0 on all workers but one

    def gradient_norm(self) -> Tensor:
        return self.sum_in_replica(self.local_squares(self.module.named_parameters()).view(1)).sqrt().view(())

    def whole(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        gathered: dict[Tensor, Tensor] = {}  # tied ones stay tied
        found: dict[str, Any] = {}
        rank = dist.get_rank(self.world)
        place = self.axes.mesh.place(rank)
        keeps = place["dp"] == place["fsdp"] == place["tp"] == 0
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):  # a module's extra state
                found[name] = tensor
                continue
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


def spread(
    model: nn.Module,
    job: Job,
    plan: Plan,
    device: torch.device,
    world: dist.ProcessGroup,
    example: Any,
    *,
    may_skip: bool,
) -> tuple[SpreadLayout, Runner | None]:
    """Spread `model` over the mesh of the plan; a collective of all workers.

    Args:
        example: how the model is called, for a few samples; to cut it into stages.
        may_skip: whether some parameters get no gradient in some steps, on some workers.

    Returns:
        The layout; and what takes shards through the stages of a pipeline, None without one.
    """
    assert plan.mesh is not None
    axes = Axes.of(plan.mesh, device, world)
    zero = torch.zeros((), dtype=statistics_dtype(model), device=device)
    shapes = copy.deepcopy(model) if is_on_meta(model) else None
    broadcast([*model.parameters(), *model.buffers()], world)
    tensor_plan = tensor_plan_of(model, plan.tensor_plan, axes.mesh.tp) if axes.mesh.tp > 1 else {}
    pipeline = None if axes.pp is None else _cut(model, job, plan, axes, axes.pp, device, example)
    notes = [] if pipeline is None else list(pipeline.notes)
    for stage in [model] if pipeline is None else pipeline.stages:
        _shard(stage, tensor_plan, axes, plan, device, may_skip=may_skip)
    module = model if pipeline is None else pipeline.module
    if shapes is not None:
        draw(shapes, module, device)
    layout = SpreadLayout(module, device, axes, zero, pipeline, may_skip=may_skip, notes=notes)
    if job.measure_noise and not layout.measures_first_pass:
        notes.append(f"the gradient noise scale is not measured under the strategy {axes.mesh}")
    if job.parity == "bitwise":
        if axes.mesh.fsdp == 1:
            align(module)
        layout.keep_whole_gradients()
    return layout, pipeline


def _cut(
    model: nn.Module, job: Job, plan: Plan, axes: Axes, group: dist.ProcessGroup, device: torch.device, example: Any
) -> Pipeline:
    """Cut the model into the stages of a pipeline."""
    from paceline.parallel.stages import Pipeline  # loads the compiler, for a second

    pipeline = Pipeline(
        model,
        group,
        plan.pipeline,
        example,
        device,
        plan.timeout_s,
        splits_backward=axes.mesh.fsdp == 1 and not plan.recompute,
    )
    for name, stages in pipeline.stages_of.items():
        if len(stages) == 1:
            continue
        if job.parity == "bitwise":
            raise JobError(
                f"parity = 'bitwise' cannot train this model with {axes.mesh}: '{name}' is used in several stages, "
                "whose gradients would be added in another order than on one worker; use parity = 'numeric', or fsdp."
            )
        # Fully sharded stages take their parameters for themselves, so no two of one worker can have the same.
        if axes.mesh.fsdp > 1 and len({stage % axes.mesh.pp for stage in stages}) < len(stages):
            raise ModelError(
                f"'{name}' is used in stages {', '.join(map(str, stages))}, some of which are on one worker, and with "
                f"{axes.mesh} each of them would train its own copy; use pipeline.stages_per_worker = 1, cut the model "
                "elsewhere (pipeline.cuts), or leave out the axis fsdp."
            )
    return pipeline


def _shard(
    stage: nn.Module, tensor_plan: TensorPlan, axes: Axes, plan: Plan, device: torch.device, *, may_skip: bool
) -> None:
    """Shard a stage's layers over the tp axis, then its parameters over the fsdp axis; move it to `device`."""
    mesh = axes.mesh
    for parameter in stage.parameters():
        parameter.data = parameter.data.contiguous()  # torch shards no others
    if tensor_plan:
        here = {name for name, module in stage.named_modules() if any(True for _ in module.parameters())}
        own = {name: style for name, style in tensor_plan.items() if name in here}
        apply_tensor_plan(stage, axes.device_mesh["tp"], own)
    if plan.recompute:
        recompute(stage)
    if mesh.fsdp > 1:
        shard(stage, axes.device_mesh["fsdp"], mesh.zero_stage, cpu_offload=plan.cpu_offload, may_skip=may_skip)
    # What has values and was not moved with its shards; with `cpu_offload` these stay.
    for parameter in stage.parameters():
        is_offloaded = plan.cpu_offload and is_dtensor(parameter)
        if not (parameter.is_meta or is_offloaded or parameter.device == device):
            parameter.data = parameter.data.to(device)
    for module in stage.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not (buffer.is_meta or buffer.device == device):
                setattr(module, name, buffer.to(device))
