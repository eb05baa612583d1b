"""A model spread over a mesh: cut into stages, then its layers sharded over tp, then its parameters over fsdp."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.dtensor_type import is_dtensor, local_shard
from paceline.errors import JobError, ModelError
from paceline.object_collectives import gather_objects
from paceline.parallel.axes import Axes
from paceline.parallel.dtensor import full_tensor, is_sharded, reshard
from paceline.parallel.engine import statistics_dtype
from paceline.parallel.gradients.gradient_norms import mean_of_squares, squared_norm
from paceline.parallel.losses import LossOf
from paceline.parallel.model_graph import ModelCall
from paceline.parallel.out_of_memory import is_out_of_memory
from paceline.parallel.sharded import recompute, shard, sharded_modules
from paceline.parallel.sharding.initial_weights import initial_weights
from paceline.parallel.tensor_plan import TensorPlan, apply_tensor_plan, described, tensor_plan_of
from paceline.spec import Mesh, Plan

if TYPE_CHECKING:
    from paceline.parallel.stages import Pipeline


class SpreadModel:
    """The part of a model that one worker of a mesh holds, and what all workers know of the whole.

    Attributes:
        module: the model as the loss function calls it; on the worker of a stage, that stage's layers.
        pipeline: None where the mesh has no axis pp.
        stages: the parts of it that this worker holds.
        notes: notes for the run's log and report.
        may_skip: whether some parameters get no gradient in some steps, on some workers.
        zero: of the dtype, and on the device, in which losses and norms are added.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        device: torch.device,
        axes: Axes,
        example: ModelCall | None,
        *,
        may_skip: bool,
        before_last_backward: Callable[[nn.Module], None] = lambda _stage: None,
        is_exact: bool = False,
    ) -> None:
        """Spread `model`; a collective of all workers of the mesh. The arguments are `MeshParallel`'s.

        Args:
            before_last_backward: called with each stage of a pipeline before its last backward pass of a step.
            is_exact: whether gradients are to have the bits of one worker.
        """
        self._axes = axes
        self._plan = plan
        self._device = device
        self.may_skip = may_skip
        self.zero = torch.zeros((), dtype=statistics_dtype(model), device=device)
        weights = initial_weights(model, axes.world)
        self._tensor_plan: TensorPlan = {}
        if axes.mesh.tp > 1:
            self._tensor_plan = tensor_plan_of(model, plan.tensor_plan, axes.mesh.tp)
        self.pipeline: Pipeline | None = None
        if axes.pp is not None:
            self.pipeline = self._cut(model, axes.pp, example, before_last_backward, is_exact=is_exact)
            model = self.pipeline.module
        self.notes: list[str] = [] if self.pipeline is None else list(self.pipeline.notes)
        if self._tensor_plan:
            self.notes.append(f"tensor plan: {described(self._tensor_plan)}")
        self.stages: list[nn.Module] = [model] if self.pipeline is None else self.pipeline.stages
        for stage in self.stages:
            self._shard(stage)
        self.module = model
        weights(model, device)
        self._was_called = False
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_evaluation)

    def _cut(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        example: ModelCall | None,
        before_last_backward: Callable[[nn.Module], None],
        *,
        is_exact: bool,
    ) -> Pipeline:
        """Cut the model into the stages of a pipeline."""
        axes, plan, device = self._axes, self._plan, self._device
        from paceline.parallel.stages import Pipeline  # loads the compiler, for a second

        pipeline = Pipeline(
            model,
            group,
            plan.pipeline,
            example,
            device,
            before_last_backward=before_last_backward,
            splits_backward=axes.mesh.fsdp == 1 and not plan.recompute,
        )
        if is_exact and pipeline.stages_that_share:
            name = next(iter(pipeline.stages_that_share))
            raise JobError(
                f"parity = 'bitwise' cannot train this model with {axes.mesh}: '{name}' is used in several stages, "
                "whose gradients would be added in another order than on one worker; use parity = 'numeric', or fsdp."
            )
        if axes.mesh.fsdp > 1:
            _check_shared(pipeline.stages_that_share, axes.mesh)
        return pipeline

    def _shard(self, stage: nn.Module) -> None:
        """Shard a stage's layers over the tp axis, then its parameters over the fsdp axis."""
        mesh, device_mesh, plan = self._axes.mesh, self._axes.device_mesh, self._plan
        if self._tensor_plan:
            here = dict(stage.named_modules()).keys() & self._tensor_plan.keys()
            own = {name: style for name, style in self._tensor_plan.items() if name in here}
            apply_tensor_plan(stage, device_mesh["tp"], own)
        if plan.recompute:
            recompute(stage)
        if mesh.fsdp > 1:
            shard(stage, device_mesh["fsdp"], mesh.zero_stage, cpu_offload=plan.cpu_offload, may_skip=self.may_skip)
        _place(stage, self._device, plan)

    def _before_forward(self, _module: nn.Module, _arguments: Any) -> None:
        self._was_called = True

    def checked(self, loss_of: LossOf) -> LossOf:
        """A loss function that may reach layers whose parameters are shards only through the model's forward pass.

        Raises:
            ModelError: when called, where it has not called the model.
        """
        if self._axes.mesh.fsdp == 1 or self.pipeline is not None:  # stages gather their own
            return loss_of

        def checked_loss(model: nn.Module, batch: Any) -> Any:
            self._was_called = False
            problem: RuntimeError | None = None
            try:
                loss = loss_of(model, batch)
            except RuntimeError as error:
                if self._was_called or is_out_of_memory(error):
                    raise
                problem = error
            if not self._was_called:
                raise ModelError(
                    "The loss function used layers of the model without calling the model, whose forward pass gathers "
                    "their shards under fsdp; call model(...), or self(...) in a method of it, or use the strategy dp."
                ) from problem
            return loss

        return checked_loss

    def _after_evaluation(self, module: nn.Module, _arguments: Any, _output: Any) -> None:
        # No backward pass follows that would free the gathered parameters, and what comes next reads the shards.
        if not torch.is_grad_enabled():
            reshard(module)

    def sync_gradients(self, module: nn.Module, is_last: bool) -> None:
        """ZeRO 1 adds gradients up once a step, 2 and 3 after every pass."""
        if self._axes.mesh.zero_stage == 1:
            for sharded in sharded_modules(module):
                sharded.set_requires_gradient_sync(is_last, recurse=False)
                sharded.set_reshard_after_backward(is_last, recurse=False)

    # --- the whole model ---

    def sum_whole_gradients(self) -> None:
        """Add up over the fsdp axis what cannot be sharded along it: the gradients of parameters without dimensions."""
        if self._axes.mesh.fsdp > 1:
            whole = [p.grad for p in self.module.parameters() if p.dim() == 0 and p.grad is not None]
            if whole:
                total = torch.stack([local_shard(grad) for grad in whole])
                dist.all_reduce(total, group=self._axes.device_mesh.get_group("fsdp"))
                for grad, summed in zip(whole, total.unbind(), strict=True):
                    local_shard(grad).copy_(summed)

    def squared_norm(self, weight: float | Tensor = 1.0, rescale: Tensor | None = None) -> Tensor:
        """The squared norm of the whole model's gradient; shards that several workers hold count once. A collective.

        Args:
            weight, rescale: as of `mean_of_squares`, where this worker's replica holds a part of the sum only.
        """
        shards: dict[int, list[Tensor]] = {}
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                shards.setdefault(self._num_copies(name, parameter), []).append(local_shard(parameter.grad))
        total = sum((squared_norm(tensors).to(self.zero) / copies for copies, tensors in shards.items()), self.zero)
        total = mean_of_squares(total, weight, rescale)
        dist.all_reduce(total, group=self._axes.world)
        return total

    def _num_copies(self, name: str, parameter: Tensor) -> int:
        """How many workers hold the same shard of a parameter."""
        mesh = self._axes.mesh
        copies = mesh.dp
        for axis, degree in (("fsdp", mesh.fsdp), ("tp", mesh.tp)):
            copies *= 1 if is_sharded(parameter, axis) else degree
        return copies * (1 if self.pipeline is None else len(self.pipeline.shared_parameters.get(name, (0,))))

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered: dict[Tensor, Tensor] = {}  # tied ones stay tied
        found: dict[str, Tensor] = {}
        place = self._axes.mesh.place(dist.get_rank(self._axes.world))
        keeps = place["dp"] == place["fsdp"] == place["tp"] == 0
        for name, tensor in tensors.items():
            if tensor not in gathered:
                all_of_it = full_tensor(tensor)
                gathered[tensor] = all_of_it.cpu() if keeps else all_of_it.new_empty(0)
            found[name] = gathered[tensor]
        if self._axes.pp is not None:
            stages = gather_objects(found, self._axes.pp)
            found = {name: tensor for stage in stages or [] for name, tensor in stage.items()}
        return found if dist.get_rank(self._axes.world) == 0 else {}


def _check_shared(stages_that_share: Mapping[str, Sequence[int]], mesh: Mesh) -> None:
    """Fully sharded stages take their parameters for themselves, so no two of one worker can have the same."""
    for name, stages in stages_that_share.items():
        if len({stage % mesh.pp for stage in stages}) < len(stages):
            raise ModelError(
                f"'{name}' is used in stages {', '.join(map(str, stages))}, some of which are on one worker, and with "
                f"{mesh} each of them would train its own copy; use pipeline.stages_per_worker = 1, cut the model "
                "elsewhere (pipeline.cuts), or leave out the axis fsdp."
            )


def _place(stage: nn.Module, device: torch.device, plan: Plan) -> None:
    """Move to `device` what has values and was not moved with its shards; with `cpu_offload` these stay."""

    def stays(tensor: Tensor) -> bool:
        is_offloaded = plan.cpu_offload and is_dtensor(tensor)
        return tensor.is_meta or is_offloaded or tensor.device == device

    if not all(stays(tensor) for tensor in (*stage.parameters(), *stage.buffers())):
        stage._apply(lambda tensor: tensor if stays(tensor) else tensor.to(device))
