"""How much memory a device needs for a job on a mesh, and how much it has.

Four things lie in a device's memory: parameters, gradients, optimizer state, and the activations that the backward pass
waits for. The first three follow from the number of parameters (Rajbhandari et al. 2020, "ZeRO", section 3); the
last is measured by `paceline probe`, or counted for a transformer (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, linear_regression

from paceline.errors import ModelError
from paceline.partition import StageLimits, best_cut, micro_batches_in_flight, split
from paceline.spec import Cluster, Job, Mesh, MicroBatchTiming
from paceline.spec.model_cost import Activations, DeviceMemory, LayerCost, Layers

USABLE_FRACTION = 0.92
"""The rest of a device's memory is the driver's, the communication library's and lost between allocations."""
_ACTIVATION_BYTES = 2.0
"""Bytes of an activation in 16 bits, which transformers are counted in."""
_ALL_REDUCES_PER_LAYER = 4
"""All-reduces of a tensor group, two forward and two backward (Shoeybi et al. 2019, "Megatron-LM", section 3)."""
_REPLICATED_FRACTION = 10 / 34
"""The fraction of a transformer layer's activations that tensor groups do not divide (Korthikanti et al. 2022)."""


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

    def gradient_copies(self, mesh: Mesh, num_shards: int) -> float:
        """How many times a worker holds the gradients of its stage.

        In bitwise parity those of a shard, and a sum for each power of two of the shards before it.
        """
        if self.is_bitwise:
            return 1.0 + num_shards.bit_length()
        return 1 / mesh.fsdp if mesh.zero_stage >= 2 else 1.0


def state_bytes(job: Job) -> StateBytes:
    """What the job's optimizer keeps. 16-bit precisions compute in 16 bits; parameters stay float32."""
    width = 8.0 if job.precision == "float64" else 4.0
    return StateBytes(width, width, width * job.optim.state_copies, job.parity == "bitwise")


@dataclass(frozen=True)
class TransformerShape:
    """The dimensions that a transformer's memory and messages depend on."""

    num_layers: int
    width: int
    """Length of a token's vector; h in the papers."""
    num_heads: int
    sequence: int
    """Tokens a sample."""


def measured_activations(
    timings: Sequence[MicroBatchTiming], num_parameters: int, state: StateBytes
) -> Activations | None:
    """The line through the measured peaks, less parameters and gradients, which were in memory too.

    The probe never updates parameters, so that no optimizer state is among its peaks. None with fewer than two peaks.
    """
    peaks = [(t.micro_batch_size, t.peak_memory_bytes) for t in timings if t.peak_memory_bytes is not None]
    if len({size for size, _ in peaks}) < 2:
        return None
    sizes, peak_bytes = zip(*peaks, strict=True)
    slope = max(0.0, linear_regression(sizes, peak_bytes).slope)
    held = num_parameters * (state.parameter + state.gradient)
    return Activations(slope, max(0.0, fmean(peak_bytes) - slope * fmean(sizes) - held))


def transformer_layers(shape: TransformerShape, num_parameters: float) -> Layers:
    """Equal layers that share all the parameters; what stands before and behind them is small beside them.

    In 16 bits, with s tokens, width h and a heads, a layer keeps s h (34 + 5 a s / h) bytes of activations a sample
    (Korthikanti et al. 2022, table 2), of which a tensor group keeps 10 s h on every worker.
    """
    token_bytes = shape.sequence * shape.width
    layer = LayerCost(
        time_s=1.0,
        parameter_bytes=num_parameters / shape.num_layers,
        activation_bytes=token_bytes * (34 + 5 * shape.num_heads * shape.sequence / shape.width),
        output_bytes=token_bytes * _ACTIVATION_BYTES,
        num_tensor_slices=shape.num_heads,
        num_all_reduces=_ALL_REDUCES_PER_LAYER,
        all_reduce_bytes=token_bytes * _ACTIVATION_BYTES,
        replicated_fraction=_REPLICATED_FRACTION,
    )
    return (layer,) * shape.num_layers


def smallest_device_bytes(cluster: Cluster) -> float:
    return float(min(device.memory_bytes for device in cluster.devices))


def worker_memory_bytes(cluster: Cluster, most_on_node: int) -> float:
    """Memory of one worker: the smallest device's; on CPU the workers of the fullest node share the smallest node's."""
    if cluster.device_kind == "cuda":
        return smallest_device_bytes(cluster)
    return min(node.memory_bytes for node in cluster.nodes) / most_on_node


def workers_on_fullest_node(cluster: Cluster, num_workers: int) -> int:
    """How many of a run's workers the fullest of the cluster's nodes gets."""
    on_first = min(num_workers, len(cluster.nodes[0].devices))
    return max(on_first, -(-num_workers // len(cluster.nodes)))


@lru_cache(maxsize=256)
def cut(layers: Layers, num_stages: int) -> tuple[Layers, ...]:
    """The layers in `num_stages` stages, none empty, the slowest of which is as fast as can be."""
    return split(layers, best_cut(layers, num_stages))


def fits(memory: DeviceMemory, memory_bytes: float) -> bool:
    """Whether it fits into a device with this memory."""
    return memory.total_bytes <= USABLE_FRACTION * memory_bytes


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
    memory_bytes: float = math.inf,
) -> DeviceMemory:
    """The fullest device of `mesh`, with the fastest cut into stages; where a device cannot hold that one, with the
    fastest that it can, if there is any.

    Args:
        micro_batch_size: Samples of one forward pass.
        num_micro_batches: Micro-batches of one worker in a step.
        layers: Empty: as many equal ones as there are stages, which tensor groups divide like a transformer's.
        memory_bytes: Memory of one device.
    """
    layers = layers or (_equal_layer(mesh.tp),) * mesh.pp
    model = _ModelOnMesh(
        mesh,
        state,
        activations.fixed_bytes,
        num_parameters / (sum(layer.parameter_bytes for layer in layers) or 1.0),
        activations.bytes_per_sample / (sum(layer.activation_bytes for layer in layers) or 1.0),
        tuple(micro_batch_size * micro_batches_in_flight(mesh.pp, i, num_micro_batches) for i in range(mesh.pp)),
        state.gradient_copies(mesh, num_micro_batches),
        recompute,
    )
    memory = model.fullest(cut(layers, mesh.pp))
    if mesh.pp == 1 or fits(memory, memory_bytes):
        return memory
    stages = model.fitting_stages(layers, memory_bytes)
    return memory if stages is None else model.fullest(stages)


@dataclass(frozen=True)
class _ModelOnMesh:
    """A model's layers on the devices of a mesh.

    Rajbhandari et al. 2020, figure 1, for psi parameters: stage 1 shards the optimizer state, 2 the gradients, 3 the
    parameters, each by 1/fsdp; replicas shard nothing. Stage 3 gathers a layer and fetches the next one meanwhile;
    stages 1 and 2 hold their part of the parameters beside the whole. A pipeline that takes turns (1F1B) holds the
    activations of `micro_batches_in_flight`. Recomputation keeps what layers give each other, and one layer's
    activations.
    """

    mesh: Mesh
    state: StateBytes
    fixed_bytes: float
    """Memory of activations that does not depend on the samples."""
    parameters_per_byte: float
    """Parameters for each of the layers' `parameter_bytes`."""
    kept_per_byte: float
    """Bytes a sample for each of the layers' `activation_bytes`."""
    in_flight: tuple[int, ...]
    """[stage]: samples whose activations it keeps at once."""
    gradient_copies: float
    recompute: bool

    def parameters(self, layer: LayerCost) -> float:
        return self.parameters_per_byte * layer.parameter_bytes / layer.tensor_shards(self.mesh.tp)

    def kept(self, layer: LayerCost) -> float:
        """Bytes of activations a sample."""
        return self.kept_per_byte * layer.activation_bytes * _kept_fraction(layer, self.mesh.tp)

    def on_stage(self, place: int, stage: Layers) -> DeviceMemory:
        own, largest = sum(map(self.parameters, stage)), max(map(self.parameters, stage))
        sample_bytes = sum(map(self.kept, stage))
        if self.recompute:
            outputs = sum(layer.output_bytes for layer in stage)
            sample_bytes = min(sample_bytes, outputs + max(map(self.kept, stage)))
        shards, zero_stage, state = self.mesh.fsdp, self.mesh.zero_stage, self.state
        gathered = own / shards
        if zero_stage == 3:  # the tree of bitwise parity takes whole gradients, with which parameters are whole
            gathered = own if state.is_bitwise else min(own, 2 * largest)
        return DeviceMemory(
            parameter_bytes=own * state.parameter / (shards if zero_stage == 3 else 1),
            gradient_bytes=own * state.gradient * self.gradient_copies,
            optimizer_bytes=own * state.optimizer / shards,
            activation_bytes=self.fixed_bytes + sample_bytes * self.in_flight[place],
            gathered_bytes=gathered * state.parameter if shards > 1 else 0.0,
        )

    def fullest(self, stages: tuple[Layers, ...]) -> DeviceMemory:
        found = [self.on_stage(place, stage) for place, stage in enumerate(stages)]
        return dataclasses.replace(max(found, key=lambda memory: memory.total_bytes), stages=stages)

    def fitting_stages(self, layers: Layers, memory_bytes: float) -> tuple[Layers, ...] | None:
        """The fastest stages of those that fit into a device; None: there are none."""
        # What grows layer by layer, and beside it the most that one layer's own needs can add to any stage.
        single = [self.on_stage(0, (layer,)) for layer in layers]
        is_gathered = self.mesh.zero_stage == 3
        states = [one.total_bytes - one.activation_bytes - is_gathered * one.gathered_bytes for one in single]
        gathered = 2 * max(one.gathered_bytes for one in single) if is_gathered else 0.0
        again = self.in_flight[0] * max(map(self.kept, layers)) if self.recompute else 0.0
        limits = StageLimits(
            memory_bytes=USABLE_FRACTION * memory_bytes - self.fixed_bytes - gathered - again,
            copies_of_parameters=1.0,
            micro_batches_kept=self.in_flight,
        )
        if sum(states) > self.mesh.pp * limits.memory_bytes:  # most meshes of a model that is far too large
            return None
        kept = [layer.output_bytes if self.recompute else self.kept(layer) for layer in layers]
        costs = [
            dataclasses.replace(layer, parameter_bytes=state, activation_bytes=activation)
            for layer, state, activation in zip(layers, states, kept, strict=True)
        ]
        try:
            return split(layers, best_cut(costs, self.mesh.pp, limits))
        except ModelError:
            return None


def _kept_fraction(layer: LayerCost, tp: int) -> float:
    """The fraction of a layer's activations that a worker of a tensor group keeps."""
    return layer.replicated_fraction + (1 - layer.replicated_fraction) / tp if layer.is_sharded_by(tp) else 1.0


def _equal_layer(tp: int) -> LayerCost:
    """A layer where only the number of parameters is known; tensor groups divide it like a transformer's."""
    return LayerCost(
        time_s=1.0,
        parameter_bytes=1.0,
        activation_bytes=1.0,
        num_tensor_slices=tp,
        replicated_fraction=_REPLICATED_FRACTION,
    )


def largest_micro_batch(
    num_parameters: float,
    state: StateBytes,
    mesh: Mesh,
    activations: Activations,
    memory_bytes: float,
    most: int,
    num_shards: int = 1,
) -> int:
    """The largest micro-batch up to `most` that fits into a device; 0: not even one sample."""

    def has_room(size: int) -> bool:
        memory = device_memory(num_parameters, state, mesh, activations, size, num_micro_batches=num_shards)
        return fits(memory, memory_bytes)

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if has_room(middle) else (low, middle - 1)
    return low
