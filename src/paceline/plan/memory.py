"""How much memory a device needs for a job on a mesh, and how much it has.

Four things lie in a device's memory: parameters, gradients, optimizer state, and the activations that the backward pass
waits for. The first three follow from the number of parameters (Rajbhandari et al. 2020, "ZeRO", section 3); the
last is measured by `paceline probe` or a trace. A peak also has what lives for the length of one layer, and parameters
and gradients that are gathered or in messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import fmean, linear_regression
from typing import NamedTuple

from paceline.mathematics import even_cut
from paceline.spec import Cluster, Job, Mesh, StepRow
from paceline.spec.algorithm import MIN_BLOCK_BYTES
from paceline.spec.model_cost import Activations, LayerCost, Layers, ModelCost

USABLE_FRACTION = 0.92
"""The usable fraction of a device's memory; the rest is used by the driver and the communication library, or lost to
fragmentation."""
_REPLICATED_FRACTION = 10 / 34
"""The fraction of a transformer layer's activations that tensor groups do not divide (Korthikanti et al. 2022)."""
_ONE_COPY = ("adagrad", "rprop", "rmsprop", "asgd")
"""Optimizers that keep one value per parameter, not two."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter: the parameter, its gradient and the optimizer state."""

    parameter: float = 4.0
    gradient: float = 4.0
    optimizer: float = 4.0
    is_bitwise: bool = False
    """Whether gradients are added in the tree of bitwise parity: every worker holds whole ones, in partial sums."""

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.optimizer


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    """Activations at the peak, less the gradients that backward has not made by then."""
    moving_bytes: float = 0
    """Parameters and gradients at the peak that are gathered, in messages, or copied to be summed."""
    stages: tuple[Layers, ...] = ()
    """The stages of the pipeline, every pp-th of which is on one device; empty: not known."""

    @property
    def state_bytes(self) -> float:
        """Bytes that stay in memory between steps."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> float:
        return self.state_bytes + self.activation_bytes + self.moving_bytes


def state_bytes(job: Job) -> StateBytes:
    """What the job's optimizer keeps. 16-bit precisions compute in 16 bits; parameters stay float32."""
    width = 8.0 if job.precision == "float64" else 4.0
    name = job.optim.name.lower()
    copies = int(job.optim.momentum > 0) if name == "sgd" else 1 if name in _ONE_COPY else 2
    return StateBytes(width, width, width * copies, job.parity == "bitwise")


def measured_activations(rows: Sequence[StepRow], num_parameters: int, state: StateBytes) -> Activations | None:
    """The line through the measured peaks of steps on one worker, less parameters, gradients and optimizer state, which
    were in memory too. None with fewer than two sizes of micro-batches."""
    alone = [row for row in rows if row.num_workers == 1]
    peaks = [(row.micro_batch_size, row.peak_memory_bytes) for row in alone if row.peak_memory_bytes is not None]
    if len({size for size, _ in peaks}) < 2:
        return None
    sizes, peak_bytes = zip(*peaks, strict=True)
    slope = max(0.0, linear_regression(sizes, peak_bytes).slope)
    return Activations(slope, max(0.0, fmean(peak_bytes) - slope * fmean(sizes) - num_parameters * state.total))


def worker_memory_bytes(cluster: Cluster, most_on_node: int) -> float:
    """Memory of one worker: the smallest device's; on CPU the workers of the fullest node share the smallest node's."""
    if cluster.device_kind == "cuda":
        return float(min(device.memory_bytes for device in cluster.devices))
    return min(node.memory_bytes for node in cluster.nodes) / most_on_node


def fits(memory: DeviceMemory, memory_bytes: float) -> bool:
    """Whether it fits into a device with this memory."""
    return memory.total_bytes <= USABLE_FRACTION * memory_bytes


def job_memory(job: Job, model: ModelCost, mesh: Mesh, recompute: bool = False) -> DeviceMemory:
    """The memory of the device of `mesh` that uses the most, with one virtual shard at a time."""
    return device_memory(
        model.num_parameters,
        state_bytes(job),
        mesh,
        model.activations,
        job.shard_size,
        num_micro_batches=-(-job.virtual_shards // mesh.num_assignments),
        layers=model.layers,
        recompute=recompute,
    )


@lru_cache(maxsize=2**12)
def device_memory(
    num_parameters: float,
    state: StateBytes,
    mesh: Mesh,
    activations: Activations,
    micro_batch_size: int,
    *,
    num_micro_batches: int = 1,
    layers: Layers = (),
    recompute: bool = False,
) -> DeviceMemory:
    """The memory of the device of `mesh` that uses the most.

    Replicas shard nothing. For psi parameters ZeRO stage 1 shards the optimizer state, 2 the gradients, 3 the
    parameters, each by 1/fsdp (Rajbhandari et al. 2020, figure 1). A pipeline runs 1F1B: its worker r of p keeps the
    activations of min(p - r, m) micro-batches (Narayanan et al. 2021, section 2.2). Recomputation keeps what layers
    give each other, and one layer's activations.

    Args:
        micro_batch_size: Samples of one forward pass.
        num_micro_batches: Micro-batches of one worker in a step.
        layers: The model's layers; empty: one for each stage, all equal, divided by tensor parallelism like those of
            a transformer.
    """
    has_layers = bool(layers)
    layers = layers or (_equal_layer(mesh.tp),) * mesh.pp
    kept_bytes = accumulate(layer.activation_bytes for layer in layers)
    counted_bytes = max(kept + layer.moment_bytes for kept, layer in zip(kept_bytes, layers, strict=True))
    parameters_per_byte = num_parameters / (sum(layer.parameter_bytes for layer in layers) or 1.0)
    kept_per_byte = micro_batch_size * activations.bytes_per_sample / (counted_bytes or 1.0)
    held_by_layer = {  # most layers of a large model are alike
        layer: _held(layer, mesh.tp, parameters_per_byte, kept_per_byte, recompute) for layer in set(layers)
    }
    stages = cut(layers, mesh.pp)
    messages = [micro_batch_size * output for output in (0.0, *(stage[-1].output_bytes for stage in stages[:-1]), 0.0)]
    inputs_bytes = micro_batch_size * num_micro_batches * activations.input_bytes if mesh.pp > 1 else 0.0
    found = []
    for worker, stage in enumerate(stages):
        held = [held_by_layer[layer] for layer in stage]
        in_flight = min(mesh.pp - worker, num_micro_batches)
        waiting = (in_flight - 1) * sum(layer.kept_bytes for layer in held)
        waiting += activations.fixed_bytes + inputs_bytes + messages[worker] + messages[worker + 1]
        found.append(_on_worker(held, waiting, state, mesh, num_micro_batches, has_layers))
    return dataclasses.replace(max(found, key=lambda memory: memory.total_bytes), stages=stages)


@lru_cache(maxsize=256)
def cut(layers: Layers, num_stages: int) -> tuple[Layers, ...]:
    """The layers cut into `num_stages` stages, none empty, that take about equally long: as training cuts them."""
    starts = even_cut([layer.time_s for layer in layers], [layer.may_begin for layer in layers], num_stages)
    return tuple(layers[start:stop] for start, stop in pairwise((*starts, len(layers))))


class _Held(NamedTuple):
    """What a worker has of a layer, of which a tensor group may divide some; bytes are those of a micro-batch."""

    parameters: float
    largest_parameter: float
    """Parameters in the largest tensor of them."""
    whole_bytes: float
    """Activations."""
    kept_bytes: float
    """Those that wait for backward; the others are computed again."""
    moment_bytes: float
    """What lives only while backward goes through the layer: gradients of its output and input."""


def _held(layer: LayerCost, tp: int, parameters_per_byte: float, kept_per_byte: float, recompute: bool) -> _Held:
    """
    Args:
        kept_per_byte: bytes of a micro-batch for each of the layer's `activation_bytes` and `moment_bytes`.
    """
    per_parameter, per_byte = parameters_per_byte / layer.tensor_shards(tp), kept_per_byte
    if layer.is_sharded_by(tp):
        per_byte *= layer.replicated_fraction + (1 - layer.replicated_fraction) / tp
    whole, output = per_byte * layer.activation_bytes, kept_per_byte * layer.output_bytes
    return _Held(
        per_parameter * layer.parameter_bytes,
        per_parameter * layer.largest_parameter_bytes,
        whole,
        min(output, whole) if recompute else whole,
        per_byte * layer.moment_bytes,
    )


def _on_worker(
    layers: Sequence[_Held], waiting_bytes: float, state: StateBytes, mesh: Mesh, num_passes: int, has_layers: bool
) -> DeviceMemory:
    """The memory of a worker at the moment of backward where it is most.

    While backward goes through a layer, the layers before it keep what they kept, and those behind it nothing. A single
    pass makes the gradients one by one; those that have not been made yet are taken off, but for replicas, whose
    gradients lie in the buckets that are summed, and stay there from step to step.

    Args:
        waiting_bytes: what is there all the time: inputs, messages, and other micro-batches of a pipeline.
        has_layers: whether the layers are known: else nobody knows how large a block is.
    """
    own, shards, gradient = sum(layer.parameters for layer in layers), mesh.fsdp, state.gradient
    is_single = num_passes == 1 and mesh.pp == 1 and not state.is_bitwise
    scatters_every_pass = mesh.zero_stage > 1 or num_passes == 1  # ZeRO 1 scatters in the last pass alone
    copies = 1.0 / shards if scatters_every_pass else 1.0
    if state.is_bitwise:  # a gradient of the shard, and a sum for each power of two of the shards before it
        copies = 1.0 + num_passes.bit_length()
    has_buckets = mesh.dp > 1 and not state.is_bitwise
    by_blocks = shards > 1 and has_layers and not state.is_bitwise
    blocks = _blocks(layers, MIN_BLOCK_BYTES / state.parameter if by_blocks else 0.0)
    sizes = [0.0, *(sum(layer.parameters for layer in block) for block in blocks), 0.0]
    whole_bytes = 0.0  # of parameters beside a worker's own: all of them where nobody knows the blocks of ZeRO 3
    if shards > 1 and not (by_blocks and mesh.zero_stage == 3):
        whole_bytes = own * state.parameter / (1 if mesh.zero_stage == 3 else shards)
    kept = waiting_bytes + sum(layer.kept_bytes for layer in layers)
    whole, behind = waiting_bytes + sum(layer.whole_bytes for layer in layers), 0.0
    moments = []  # bytes of activations, and of parameters and gradients that are gathered or in messages
    for number in range(len(blocks), 0, -1):
        before, block_size, following = sizes[number - 1 : number + 2]
        gathered = whole_bytes
        if by_blocks and mesh.zero_stage == 3:  # a block is copied out of its message; then the next one's is there
            gathered = (before + block_size) * state.parameter
            moments.append((kept, 2 * block_size * state.parameter + gradient * following))
        done = behind
        for layer in reversed(blocks[number - 1]):
            done += layer.parameters
            made = done if shards == 1 else behind
            moving = gathered
            if by_blocks:  # gradients of the block, and a message with those of the block behind it
                moving += gradient * (done - behind + (following if scatters_every_pass else 0.0))
            elif shards == 1 and not state.is_bitwise and (num_passes > 1 or has_buckets):  # one that is added to a sum
                moving += gradient * layer.largest_parameter
            missing = gradient / shards * (own - made) if is_single and not has_buckets else 0.0
            moments.append((min(kept + layer.whole_bytes, whole) + layer.moment_bytes - missing, moving))
            kept, whole = kept - layer.kept_bytes, whole - layer.whole_bytes
        behind = done
    late_scatter = max(sizes) if by_blocks and not scatters_every_pass else 0.0
    moments.append((waiting_bytes, whole_bytes + gradient * late_scatter))
    activation_bytes, moving_bytes = max(moments, key=sum)
    return DeviceMemory(
        parameter_bytes=own * state.parameter / (shards if mesh.zero_stage == 3 else 1),
        gradient_bytes=own * gradient * copies,
        optimizer_bytes=own * state.optimizer / shards,
        activation_bytes=max(0.0, activation_bytes),
        moving_bytes=moving_bytes + min(0.0, activation_bytes),
    )


def _blocks(layers: Sequence[_Held], min_parameters: float) -> list[list[_Held]]:
    """The layers that `parallel/sharded.py` gathers together: small neighbours, until they have enough parameters."""
    found: list[list[_Held]] = [[]]
    for layer in layers:
        if found[-1] and sum(one.parameters for one in found[-1]) >= min_parameters:
            found.append([])
        found[-1].append(layer)
    return found


def _equal_layer(tp: int) -> LayerCost:
    """A layer of which only the number of parameters is known; tensor parallelism divides it like a transformer's."""
    return LayerCost(
        time_s=1.0,
        parameter_bytes=1.0,
        activation_bytes=1.0,
        num_tensor_slices=tp,
        replicated_fraction=_REPLICATED_FRACTION,
    )
