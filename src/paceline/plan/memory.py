"""How much memory a device needs for a job on a mesh, and how much it has.

Four things lie in a device's memory: parameters, gradients, optimizer state, and the activations that the backward pass
waits for. The first three follow from the number of parameters (Rajbhandari et al. 2020, "ZeRO", section 3); the
last is measured by `paceline probe`, or counted for a transformer (Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4). A peak also has what lives for the length of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import fmean, linear_regression

from paceline.partition import even_cut, half_passes_in_flight, in_flight_by_stage
from paceline.plan.peak_memory import USABLE_FRACTION, ModelOnMesh, StateBytes
from paceline.spec import Cluster, Job, Mesh, PipelineSpec, StepRow
from paceline.spec.model_cost import Activations, DeviceMemory, LayerCost, Layers
from paceline.words import size

_ONE_STAGE_EACH = PipelineSpec()
_ACTIVATION_BYTES = 2.0
"""Bytes of an activation in 16 bits, which transformers are counted in."""
_ALL_REDUCES_PER_LAYER = 4
"""All-reduces of a tensor group, two forward and two backward (Shoeybi et al. 2019, "Megatron-LM", section 3)."""
_REPLICATED_FRACTION = 10 / 34
"""The fraction of a transformer layer's activations that tensor groups do not divide (Korthikanti et al. 2022)."""


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


def measured_activations(rows: Sequence[StepRow], num_parameters: int, state: StateBytes) -> Activations | None:
    """The line through the measured peaks of steps on one worker, less parameters, gradients and optimizer state, which
    were in memory too. None with fewer than two sizes of micro-batches."""
    alone = [row for row in rows if row.num_workers == 1]
    peaks = [(row.micro_batch_size, row.peak_memory_bytes) for row in alone if row.peak_memory_bytes is not None]
    if len({size for size, _ in peaks}) < 2:
        return None
    sizes, peak_bytes = zip(*peaks, strict=True)
    slope = max(0.0, linear_regression(sizes, peak_bytes).slope)
    held = num_parameters * (state.parameter + state.gradient + state.optimizer)
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


def worker_memory_bytes(cluster: Cluster, most_on_node: int) -> float:
    """Memory of one worker: the smallest device's; on CPU the workers of the fullest node share the smallest node's."""
    if cluster.device_kind == "cuda":
        return float(min(device.memory_bytes for device in cluster.devices))
    return min(node.memory_bytes for node in cluster.nodes) / most_on_node


def workers_on_fullest_node(cluster: Cluster, num_workers: int) -> int:
    """How many of a run's workers the fullest of the cluster's nodes gets."""
    on_first = min(num_workers, len(cluster.nodes[0].devices))
    return max(on_first, -(-num_workers // len(cluster.nodes)))


@lru_cache(maxsize=256)
def cut(layers: Layers, num_stages: int) -> tuple[Layers, ...]:
    """The layers cut into `num_stages` stages, none empty, that take about equally long: as training cuts them."""
    starts = even_cut([layer.time_s for layer in layers], [layer.may_begin for layer in layers], num_stages)
    return tuple(layers[start:stop] for start, stop in pairwise((*starts, len(layers))))


def fits(memory: DeviceMemory, memory_bytes: float) -> bool:
    """Whether it fits into a device with this memory."""
    return memory.total_bytes <= USABLE_FRACTION * memory_bytes


def parts_in_words(memory: DeviceMemory) -> str:
    """What takes the memory."""
    moving = memory.gathered_bytes + memory.transit_bytes
    return (
        f"{size(memory.parameter_bytes)} parameters, {size(memory.gradient_bytes)} gradients, "
        f"{size(memory.optimizer_bytes)} optimizer state, {size(memory.activation_bytes)} activations"
        + (f", {size(moving)} in messages and sums" if moving else "")
    )


def device_memory(
    num_parameters: float,
    state: StateBytes,
    mesh: Mesh,
    activations: Activations,
    micro_batch_size: int,
    *,
    num_micro_batches: int = 1,
    layers: Layers = (),
    pipeline: PipelineSpec = _ONE_STAGE_EACH,
    recompute: bool = False,
) -> DeviceMemory:
    """The memory of the device of `mesh` that uses the most.

    Args:
        micro_batch_size: Samples of one forward pass.
        num_micro_batches: Micro-batches of one worker in a step.
        layers: The model's layers; empty: one for each stage, all equal, divided by tensor parallelism like those of
            a transformer.
    """
    num_stages = mesh.pp * pipeline.stages_per_worker
    given, layers = layers, layers or (_equal_layer(mesh.tp),) * num_stages
    kept_bytes = accumulate(layer.activation_bytes for layer in layers)
    counted_bytes = max(kept + layer.moment_bytes for kept, layer in zip(kept_bytes, layers, strict=True))
    schedule = num_micro_batches, pipeline.schedule, pipeline.stages_per_worker
    model = ModelOnMesh(
        mesh,
        state,
        activations.fixed_bytes,
        micro_batch_size * num_micro_batches * activations.input_bytes if mesh.pp > 1 else 0.0,
        num_parameters / (sum(layer.parameter_bytes for layer in layers) or 1.0),
        activations.bytes_per_sample / (counted_bytes or 1.0),
        micro_batch_size,
        tuple(in_flight_by_stage(mesh.pp, worker, *schedule) for worker in range(mesh.pp)),
        tuple(micro_batch_size * half_passes_in_flight(mesh.pp, worker, *schedule) for worker in range(mesh.pp)),
        num_micro_batches,
        bool(given),
        recompute,
    )
    return model.fullest(cut(layers, num_stages))


def _equal_layer(tp: int) -> LayerCost:
    """A layer of which only the number of parameters is known; tensor parallelism divides it like a transformer's."""
    return LayerCost(
        time_s=1.0,
        parameter_bytes=1.0,
        activation_bytes=1.0,
        num_tensor_slices=tp,
        replicated_fraction=_REPLICATED_FRACTION,
    )
