"""Tries a mesh of any size on one node in seconds: runs the training code with fake workers and fake tensors.

torch's fake process group has any number of ranks and sends nothing; fake tensors have shapes and no values. The model
is recorded, cut into stages and sharded by the functions that training uses, every stage runs one forward and backward
pass, and the bytes that would be sent and kept are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.dtensor_type import local_shard
from paceline.errors import JobError
from paceline.parallel.dry_run.comm_bytes import CommBytes
from paceline.parallel.dtensor import device_mesh_of, local_bytes
from paceline.parallel.pipeline.calls import ModelCall, generator_state
from paceline.parallel.pipeline.layer_costs import (
    META_FLOPS_PER_S,
    backward,
    counting_kept,
    measure_layers,
    tensor_bytes,
)
from paceline.parallel.pipeline.recorder import record
from paceline.parallel.pipeline.recording import Recording
from paceline.parallel.pipeline.shared import holders_of
from paceline.parallel.pipeline.stage import Stage, stages_of
from paceline.parallel.sharded import shard
from paceline.parallel.sharding.initial_weights import allocate
from paceline.parallel.tensor import (
    Applied,
    TensorPlan,
    begin_divided,
    bytes_per_sample,
    counting_divided,
    declared_plan,
    find_plan,
    layer_sizes,
    tensor_parallel,
)
from paceline.partition import best_cut, micro_batches_in_flight
from paceline.spec import Mesh
from paceline.spec.mesh import AxisName
from paceline.spec.model_cost import Activations, DeviceMemory, LayerCost, ModelCost

_MOST_TENSOR_WORKERS = 64


@dataclass(frozen=True)
class StageCost:
    """What one worker of a pipeline stage holds, and what it sends for one micro-batch."""

    layers: tuple[str, str]
    """The names of the stage's first and last layer."""
    time: float
    """Time of forward and backward in an arbitrary unit, the same for all stages."""
    parameter_bytes: int
    """Bytes of the worker's shards of parameters."""
    activation_bytes: int
    """Bytes of activations kept from forward for backward."""
    sent_bytes: Mapping[AxisName, float]
    """Bytes sent per micro-batch along fsdp, tp and pp."""
    whole_parameter_bytes: int
    """Bytes of the stage's parameters before sharding along fsdp, padded as fully_shard does."""
    gradient_bytes: int
    """Bytes of the worker's shards of trained parameters."""
    tied_bytes: int
    """Bytes of gradients of parameters that other stages hold too: sent to each of them once per step, but for bitwise
    parity."""


@dataclass(frozen=True)
class DryRun:
    """The cost of a step on a mesh for one worker of each pipeline stage; the other workers of a stage are alike."""

    mesh: Mesh
    num_micro_batches: int
    stages: tuple[StageCost, ...]
    optimizer_copies: int
    """Number of values that the optimizer keeps per parameter."""
    tensor_plan: TensorPlan
    """How the layers of all stages are sharded along tp."""
    is_bitwise: bool = False
    """Whether gradients are added in the tree of bitwise parity: a worker holds all of them, in its partial sums."""

    @property
    def memory(self) -> tuple[DeviceMemory, ...]:
        """Bytes held by a worker of every stage, including the activations of all micro-batches in flight.

        The few layers that ZeRO stage 3 gathers at a time are not included."""
        keeps_gathered = self.mesh.fsdp > 1 and self.mesh.zero_stage < 3
        keeps_gradients = self.mesh.fsdp > 1 and self.mesh.zero_stage == 1  # whole, until the last backward pass
        # The gradients of a shard, and a sum for each power of two of those before it.
        num_vectors = 1 + self.num_micro_batches.bit_length() if self.is_bitwise else int(keeps_gradients)
        return tuple(
            DeviceMemory(
                parameter_bytes=stage.parameter_bytes,
                gradient_bytes=num_vectors * stage.whole_parameter_bytes or stage.gradient_bytes,
                optimizer_bytes=stage.gradient_bytes * self.optimizer_copies,
                activation_bytes=stage.activation_bytes
                * micro_batches_in_flight(self.mesh.pp, place, self.num_micro_batches),
                gathered_bytes=stage.whole_parameter_bytes * keeps_gathered,
            )
            for place, stage in enumerate(self.stages)
        )

    def sent_bytes(self, axis: AxisName) -> float:
        """The maximum over workers of the bytes sent along an axis in a step.

        In an all_reduce of S bytes each of n workers sends 2 (n - 1)/n S, in an all_gather or reduce_scatter half.
        The loss and at most one number per parameter are not counted.
        """
        return max(self.sent_bytes_of(stage, axis) for stage in self.stages)

    def sent_bytes_of(self, stage: StageCost, axis: AxisName) -> float:
        """Bytes that a worker of one stage sends along an axis in a step."""
        if axis == "dp":
            return 2 * (self.mesh.dp - 1) / self.mesh.dp * stage.gradient_bytes
        # The first stage of ZeRO gathers and scatters once a step, not for every micro-batch.
        times = 1 if axis == "fsdp" and self.mesh.zero_stage == 1 else self.num_micro_batches
        return times * stage.sent_bytes.get(axis, 0.0) + self._tied_bytes(stage) * (axis == "pp")

    def _tied_bytes(self, stage: StageCost) -> float:
        """In bitwise parity gradients of shared parameters go through the stages with every micro-batch, and back once;
        between the first stage and the last, which those of most models are shared by."""
        if not self.is_bitwise or stage is self.stages[0]:
            return stage.tied_bytes
        return self.num_micro_batches * max(one.tied_bytes for one in self.stages)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The modules that begin a stage, without the first stage's, as in `PipelineSpec`."""
        return tuple(stage.layers[0] for stage in self.stages[1:])

    @property
    def bubble(self) -> float:
        """The fraction of time in which workers of a pipeline wait: 1 - m t / ((m + p - 1) t_max), where t is the mean
        stage time (Huang et al. 2019, "GPipe", section 2.3, for stages that differ)."""
        times, m = [stage.time for stage in self.stages], self.num_micro_batches
        turns = m + len(times) - 1
        return 1 - m * sum(times) / len(times) / (turns * max(times)) if max(times) else 0.0


def dry_run(
    model: nn.Module,
    arguments: Sequence[Any],
    mesh: Mesh,
    num_micro_batches: int,
    *,
    optimizer_copies: int = 1,
    is_bitwise: bool = False,
) -> DryRun:
    """Try `mesh` with a model on the meta device; the model is consumed.

    Args:
        arguments: the model's arguments for one micro-batch, on the meta device.
        is_bitwise: whether the job has `parity = "bitwise"`.

    Raises:
        JobError: this process trains already.
        ModelError: the model cannot be cut into these stages, or its layers not be sharded so.
    """
    given = declared_plan(model, None, mesh.tp) if mesh.tp > 1 else None
    recording, costs = _record_on_meta(model, arguments)
    starts = best_cut(costs, mesh.pp) if mesh.pp > 1 else (0,)
    runs = list(zip(starts, (*starts[1:], len(costs)), strict=True))
    # All stages before the first is sharded: parameters that stages share would be sharded twice.
    stages = [one.train() for one in ([recording.model] if mesh.pp == 1 else stages_of(recording, starts))]
    holders = holders_of(stages)
    if mesh.pp > 1 and (is_bitwise or any(len(of_one) > 1 for of_one in holders.values())):  # as in training
        given = given or find_plan(recording.model, mesh.tp)
    others = [{name: len(holders[parameter]) - 1 for name, parameter in one.named_parameters()} for one in stages]
    found: list[StageCost] = []
    styles: dict[str, str] = {}
    applied = Applied()
    message = _Message()
    with _fake_workers(mesh) as device_mesh:
        for stage, run, num_others in zip(stages, runs, others, strict=True):
            # As with every model on the meta device: first sharded, then allocated, here as fake tensors.
            if mesh.tp > 1:
                found_plan = tensor_parallel(stage, device_mesh["tp"], given=given, applied=applied)
                styles |= found_plan.styles
            facts, message = _try_stage(stage, recording, costs, run, message, num_others, device_mesh, mesh, arguments)
            found.append(facts)
    return DryRun(mesh, num_micro_batches, tuple(found), optimizer_copies, TensorPlan(mesh.tp, styles), is_bitwise)


def _record_on_meta(model: nn.Module, arguments: Sequence[Any]) -> tuple[Recording, list[LayerCost]]:
    """The layers of a model on the meta device, and their costs by arithmetic."""
    recording = record(model, ModelCall(tuple(arguments)))
    return recording, measure_layers(recording, torch.device("meta"))


def on_paper(build: Callable[[], nn.Module], sample: Any, num_samples: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model of `build` on the meta device, and its arguments for `num_samples` samples like `sample`."""
    with torch.device("meta"):
        model = build()
    inputs = pytree.tree_map(
        lambda leaf: torch.empty((num_samples, *leaf.shape), dtype=leaf.dtype, device="meta"),
        pytree.tree_map(torch.as_tensor, sample),
    )
    return model, (inputs,)


def trace_model(model: nn.Module, arguments: Sequence[Any], num_samples: int) -> ModelCost:
    """The costs of a model on the meta device for one sample, by groups of layers: from one layer that may begin a
    pipeline stage up to the next.

    Args:
        arguments: the model's arguments for `num_samples` samples, on the meta device.
    """
    recording, costs = _record_on_meta(model, arguments)
    sizes = layer_sizes(model, lambda one: one(*arguments), num_samples)
    degrees = _largest_degrees(model)
    plan = find_plan(model, 2) if degrees else TensorPlan(2, {})
    itemsize = max((p.element_size() for p in model.parameters()), default=4)
    starts = [number for number, cost in enumerate(costs) if cost.may_begin or not number]
    groups = [slice(start, stop) for start, stop in zip(starts, (*starts[1:], len(costs)), strict=True)]
    total_s = sum(cost.time_s for cost in costs)
    modules = [[layer.name for layer in recording.layers[group] if layer.function is None] for group in groups]
    layers = []
    num_slices = 1
    for group, names, begins_divided in zip(groups, modules, begin_divided(plan, modules), strict=True):
        own = [layer for layer in plan.layers if any(layer == name or layer.startswith(f"{name}.") for name in names)]
        num_slices = min((degrees.get(layer, 1) for layer in own), default=num_slices if begins_divided else 1)
        sent_bytes = sum(bytes_per_sample(plan.of_layer(layer), sizes, itemsize) for layer in own)
        together = costs[group]
        layers.append(
            LayerCost(
                name=together[0].name,
                time_s=sum(cost.time_s for cost in together) / (total_s or 1.0),
                parameter_bytes=sum(cost.parameter_bytes for cost in together),
                activation_bytes=sum(cost.activation_bytes for cost in together) / num_samples,
                moment_bytes=max(cost.moment_bytes for cost in together) / num_samples,
                waiting_bytes=sum(cost.waiting_bytes for cost in together) / num_samples,
                largest_parameter_bytes=max(cost.largest_parameter_bytes for cost in together),
                output_bytes=together[-1].output_bytes / num_samples,
                num_tensor_slices=num_slices,
                num_all_reduces=len(own),
                # Two workers send S bytes each for a sum of S.
                all_reduce_bytes=sent_bytes / len(own) if own else 0.0,
            )
        )
    # What one layer keeps as its output and the next one as its input counts once in the whole model.
    with counting_kept([*model.parameters(), *model.buffers()]) as kept_bytes:
        output = model(*arguments)
    layers = _with_loss(layers, kept_bytes() / num_samples, tensor_bytes(output) / num_samples)
    found = tuple(_with_tensor_plan(model, arguments, plan, num_samples, layers))
    kept = accumulate(layer.activation_bytes for layer in found)
    return ModelCost(
        num_parameters=sum(round(layer.parameter_bytes / itemsize) for layer in layers),
        activations=Activations(
            max(before + layer.moment_bytes for before, layer in zip(kept, found, strict=True)),
            input_bytes=tensor_bytes(arguments) / num_samples,
        ),
        layers=found,
        flops_per_sample=total_s * META_FLOPS_PER_S / num_samples,
    )


def _with_loss(layers: Sequence[LayerCost], kept_bytes: float, output_bytes: float) -> list[LayerCost]:
    """The layers with a loss behind the last one, which keep `kept_bytes` together besides it.

    A loss keeps as much as the model's output, as cross entropy does, and needs as much twice in its backward pass.
    """
    *before, last = layers
    with_loss = replace(
        last,
        activation_bytes=last.activation_bytes + output_bytes,
        moment_bytes=max(last.moment_bytes, 2 * output_bytes),
    )
    counted_bytes = sum(layer.activation_bytes for layer in layers) + output_bytes
    factor = (kept_bytes + output_bytes) / (counted_bytes or 1.0)
    return [replace(one, activation_bytes=one.activation_bytes * factor) for one in (*before, with_loss)]


def _with_tensor_plan(
    model: nn.Module, arguments: Sequence[Any], plan: TensorPlan, num_samples: int, layers: Sequence[LayerCost]
) -> list[LayerCost]:
    """The layers, with the fraction of their activations that each worker of a tensor group keeps whole, the same for
    all that it divides."""
    with counting_divided(model, plan) as divided_bytes:
        output = model(*arguments)
    del output
    kept = sum(layer.activation_bytes for layer in layers if layer.num_tensor_slices > 1)
    replicated = max(0.0, 1.0 - divided_bytes() / num_samples / (kept or 1.0))
    return [replace(layer, replicated_fraction=replicated) for layer in layers]


def _largest_degrees(model: nn.Module) -> dict[str, int]:
    """The largest power of two by which each layer can be sharded."""
    found: dict[str, int] = {}
    degree = 2
    while degree <= _MOST_TENSOR_WORKERS:
        try:
            plan = find_plan(model, degree)
        except Exception:  # heads that do not divide, in words that fit this degree only
            break
        found |= dict.fromkeys(plan.layers, degree)
        degree *= 2
    return found


@dataclass(frozen=True)
class _Message:
    """The message that one stage sends to the next."""

    has_gradient: tuple[bool, ...] = ()
    """Whether each of its tensors has a gradient."""
    carries_generators: bool = False
    """Whether random numbers have been drawn: the next stage continues from this generator state."""


def _try_stage(
    stage: nn.Module,
    recording: Recording,
    costs: Sequence[LayerCost],
    run: tuple[int, int],
    message: _Message,
    num_others: Mapping[str, int],
    device_mesh: DeviceMesh,
    mesh: Mesh,
    arguments: Sequence[Any],
) -> tuple[StageCost, _Message]:
    """Run forward and backward of one sharded stage; returns its costs and the message to the next stage.

    Args:
        message: the message that the stage receives.
        num_others: the number of other stages that hold each parameter.
    """
    start, stop = run
    generator_bytes = generator_state(torch.device("cpu")).nbytes
    whole_bytes = sum(_padded_bytes(local_shard(one), mesh.fsdp) for one in stage.parameters())
    if mesh.fsdp > 1:
        shard(stage, device_mesh["fsdp"], mesh.zero_stage, cpu_offload=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        allocate(stage, torch.device("cpu"))
        crossing = recording.trained.crossing(start)
        arriving = _with_gradients([_fake(recording.values[slot]) for slot in crossing], message.has_gradient)
        given = [_fake(argument) for argument in arguments]
        if isinstance(stage, Stage):
            given = [ModelCall(tuple(given)), *([recording.outline(start), *arriving] if start else [])]
        counter = CommBytes({device_mesh[axis].get_group().group_name: axis for axis in ("fsdp", "tp")})
        with _Answers() as answers, counter:
            with counting_kept() as kept_bytes:
                leaving = stage(*given)
            backward(leaving)
        leaving_tensors = [leaf for leaf in pytree.tree_leaves(leaving) if isinstance(leaf, Tensor)]
        following = _Message(
            tuple(leaf.requires_grad for leaf in leaving_tensors), message.carries_generators or answers.has_drawn
        )
        sent: dict[AxisName, float] = dict(counter.sent_bytes)
        # Gradients of received tensors are sent back.
        arriving_tensors = [leaf for leaf in pytree.tree_leaves(arriving) if isinstance(leaf, Tensor)]
        sent["pp"] = tensor_bytes([tensor for tensor in arriving_tensors if tensor.requires_grad])
        if stop < len(costs):
            sent["pp"] += tensor_bytes(leaving_tensors) + generator_bytes * following.carries_generators
    trained = {name: local_bytes([one]) for name, one in stage.named_parameters() if one.requires_grad}
    facts = StageCost(
        layers=(recording.name(start), recording.name(stop - 1)),
        time=sum(cost.time_s for cost in costs[start:stop]),
        parameter_bytes=local_bytes(stage.parameters()),
        activation_bytes=kept_bytes(),
        sent_bytes=sent,
        whole_parameter_bytes=whole_bytes,
        gradient_bytes=sum(trained.values()),
        tied_bytes=sum(num_others[name] * size for name, size in trained.items()),
    )
    return facts, following


def _padded_bytes(parameter: Tensor, num_workers: int) -> int:
    """Bytes of one parameter as fully_shard gathers it: rows padded to a multiple of the workers."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return -(-rows // num_workers) * num_workers * (parameter.nbytes // max(rows, 1))


def _with_gradients(values: Sequence[Any], has_gradient: Sequence[bool]) -> list[Any]:
    """The values, whose tensors have gradients or have none."""
    flags = iter(has_gradient)
    found: list[Any] = pytree.tree_map_only(Tensor, lambda tensor: tensor.requires_grad_(next(flags)), list(values))
    return found


def _fake(value: Any) -> Any:
    """Tensors like those of `value`, in the CPU memory that fake tensors pretend to have."""
    return pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), value)


class _Answers(TorchDispatchMode):
    """Answers 1 where a number is read out of a fake tensor, so checks of values pass; notices random draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1
        self.has_drawn |= _draws_random_numbers(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextmanager
def _fake_workers(mesh: Mesh) -> Iterator[DeviceMesh]:
    """The device mesh of fake workers, of which this process is the first."""
    if dist.is_initialized():
        raise JobError("A dry run needs a process of its own: this one has joined other workers already.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.num_workers)
    try:
        yield device_mesh_of(mesh, "cpu")
    finally:
        dist.destroy_process_group()


def _draws_random_numbers(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = operator._schema.arguments
    given = {one.name: one.default_value for one in arguments}
    given |= {one.name: value for one, value in zip(arguments, args, strict=False)}
    # Attention is tagged as well, and draws only where it drops something.
    return (given | dict(kwargs)).get("dropout_p") != 0.0
