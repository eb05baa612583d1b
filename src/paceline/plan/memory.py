"""How much memory a device needs for a job on a mesh, and how much it has.

Four things lie in a device's memory: parameters, gradients, optimizer state, and the activations that the backward pass
waits for. The first three follow from the number of parameters (Rajbhandari et al. 2020, "ZeRO", section 3); the
last is measured by `paceline probe` or a trace. A peak also has what lives for the length of one layer, and parameters
and gradients that are gathered or in messages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import fmean, linear_regression

from paceline.mathematics import even_cut
from paceline.spec import Cluster, Job, Mesh
from paceline.spec.algorithm import MIN_BLOCK_BYTES
from paceline.spec.cluster import JobTiming
from paceline.spec.forecast import LayerCost, Layers, ModelCost

USABLE_FRACTION = 0.92
"""The usable fraction of a device's memory; the rest is used by the driver and the communication library, or lost to
fragmentation."""
_ONE_COPY = ("adagrad", "rprop", "rmsprop", "asgd")
"""Optimizers that keep one value per parameter, not two."""
_UNKNOWN_LAYERS = (LayerCost(time_s=1.0, parameter_bytes=1.0, activation_bytes=1.0),) * 8
"""Stand in for a model that was not traced."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter."""

    parameter: float = 4.0
    """Bytes of the parameter, and as many of its gradient."""
    optimizer: float = 4.0
    is_bitwise: bool = False
    """Whether gradients are added in the tree of bitwise parity: every worker holds whole ones, in partial sums."""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
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
    """The bytes that training keeps for a parameter. 16-bit precisions compute in 16 bits; parameters stay float32."""
    width = 8.0 if job.precision == "float64" else 4.0
    name = job.optim.name.lower()
    copies = int(job.optim.momentum > 0) if name == "sgd" else 1 if name in _ONE_COPY else 2
    return StateBytes(width, width * copies, job.parity == "bitwise")


def with_measured_memory(model: ModelCost, job: Job, timing: JobTiming) -> ModelCost:
    """The model with the line through the measured peaks of steps on one worker, less parameters, gradients and
    optimizer state, which were in memory too; as it is with fewer than two sizes of micro-batches."""
    alone = [row for row in timing.steps if row.num_workers == 1]
    peaks = [(row.micro_batch_size, row.peak_memory_bytes) for row in alone if row.peak_memory_bytes is not None]
    if len({size for size, _ in peaks}) < 2:
        return model
    sizes, peak_bytes = zip(*peaks, strict=True)
    slope = max(0.0, linear_regression(sizes, peak_bytes).slope)
    state = state_bytes(job)
    held_bytes = timing.num_parameters * (2 * state.parameter + state.optimizer)
    fixed_bytes = max(0.0, fmean(peak_bytes) - slope * fmean(sizes) - held_bytes)
    return dataclasses.replace(model, bytes_per_sample=slope, fixed_bytes=fixed_bytes)


def worker_memory_bytes(cluster: Cluster, most_on_node: int) -> float:
    """Memory of one worker: the smallest device's; on CPU the workers of the fullest node share the smallest node's.
    Infinite where it is not known."""
    if cluster.device_kind == "cuda":
        return float(min(device.memory_bytes for device in cluster.devices)) or math.inf
    return min(node.memory_bytes for node in cluster.nodes) / most_on_node or math.inf


def fits(needed_bytes: float, memory_bytes: float) -> bool:
    """Whether so much fits into a device with this memory."""
    return needed_bytes <= USABLE_FRACTION * memory_bytes


def job_memory(job: Job, model: ModelCost, mesh: Mesh, recompute: bool = False) -> DeviceMemory:
    """The memory of the device of `mesh` that uses the most, with one virtual shard at a time."""
    num_micro_batches = -(-job.virtual_shards // mesh.num_assignments)
    return device_memory(model, state_bytes(job), mesh, job.shard_size, num_micro_batches, recompute)


@lru_cache(maxsize=2**12)
def device_memory(
    model: ModelCost,
    state: StateBytes,
    mesh: Mesh,
    micro_batch_size: int,
    num_micro_batches: int = 1,
    recompute: bool = False,
) -> DeviceMemory:
    """The memory of the device of `mesh` that uses the most.

    Replicas shard nothing. For psi parameters ZeRO stage 1 shards the optimizer state, 2 the gradients, 3 the
    parameters, each by 1/fsdp (Rajbhandari et al. 2020, figure 1). A pipeline runs 1F1B: its worker r of p keeps the
    activations of p - r micro-batches (Narayanan et al. 2021, section 2.2). Torch has buffers for all that arrives in a
    step, forward and backward, and copies what leaves. Recomputation keeps what layers are given, and one layer's
    activations.
    """
    layers = model.layers or _UNKNOWN_LAYERS
    kept_bytes = accumulate(layer.activation_bytes for layer in layers)
    counted_bytes = max(kept + layer.moment_bytes for kept, layer in zip(kept_bytes, layers, strict=True))
    of_parameters = model.num_parameters * state.parameter / (sum(layer.parameter_bytes for layer in layers) or 1.0)
    of_activations = micro_batch_size * (model.bytes_per_sample or 0.0) / (counted_bytes or 1.0)
    parts = {layer: _part(layer, mesh.tp, of_parameters, of_activations) for layer in set(layers)}  # most are alike
    stages = cut(layers, mesh.pp)
    messages = [micro_batch_size * output for output in (0.0, *(stage[-1].output_bytes for stage in stages[:-1]), 0.0)]
    sample_bytes, num_passes = micro_batch_size * model.input_bytes, max(num_micro_batches, mesh.pp)
    found = []
    for worker, stage in enumerate(stages):
        own, others = [parts[layer] for layer in stage], mesh.pp - worker - 1
        arriving, leaving = messages[worker], messages[worker + 1]
        given = [arriving or sample_bytes, *(part.output_bytes for part in own[:-1])]
        whole = [part.activation_bytes for part in own]
        kept = list(map(min, given, whole)) if recompute else whole
        waiting = model.fixed_bytes + num_micro_batches * sample_bytes + others * sum(kept)
        waiting += num_passes * (arriving + leaving) + (others + 2) * leaving
        found.append(_on_worker(own, kept, waiting, state, mesh, num_micro_batches))
    return dataclasses.replace(max(found, key=lambda memory: memory.total_bytes), stages=stages)


@lru_cache(maxsize=256)
def cut(layers: Layers, num_stages: int) -> tuple[Layers, ...]:
    """The layers cut into `num_stages` stages, none empty, that take about equally long: as training cuts them."""
    starts = even_cut([layer.time_s for layer in layers], [layer.may_begin for layer in layers], num_stages)
    return tuple(layers[start:stop] for start, stop in pairwise((*starts, len(layers))))


def _part(layer: LayerCost, tp: int, of_parameters: float, of_activations: float) -> LayerCost:
    """A worker's part of a layer with one micro-batch, in a tensor group of `tp` workers. Each of the layer's bytes of
    parameters and activations becomes `of_parameters` and `of_activations` bytes."""
    per_parameter, per_byte = of_parameters / layer.tensor_shards(tp), of_activations
    if layer.tensor_shards(tp) > 1:
        per_byte *= layer.replicated_fraction + (1 - layer.replicated_fraction) / tp
    return dataclasses.replace(
        layer,
        parameter_bytes=per_parameter * layer.parameter_bytes,
        largest_parameter_bytes=per_parameter * layer.largest_parameter_bytes,
        tied_bytes=per_parameter * layer.tied_bytes,
        root_bytes=per_parameter * layer.root_bytes,
        activation_bytes=per_byte * layer.activation_bytes,
        moment_bytes=per_byte * layer.moment_bytes,
        output_bytes=of_activations * layer.output_bytes,
    )


def _on_worker(
    layers: Sequence[LayerCost],
    kept_bytes: Sequence[float],
    waiting_bytes: float,
    state: StateBytes,
    mesh: Mesh,
    num_passes: int,
) -> DeviceMemory:
    """The memory of a worker at the moment of the backward pass when it is largest.

    While backward goes through a layer, the layers before it keep what they kept, and those behind it nothing. Where
    parameters are sharded, blocks of layers are gathered: one while the one behind it is computed with, and backward
    has the gradients of a block whole until they are in a message. What stands in no list of layers, the root, is whole
    from when the loss has been through backward, and so are its gradients, of which an embedding's may be the
    classifier's too.

    Args:
        kept_bytes: activations of each layer that wait for backward; the others are computed again.
        waiting_bytes: what is there all the time: inputs, messages, and other micro-batches of a pipeline.
    """
    own, shards = sum(layer.parameter_bytes for layer in layers), mesh.fsdp
    tied = sum(layer.tied_bytes for layer in layers)
    if mesh.pp > 1:  # the layer whose parameters they are is in another stage, which has a gradient of its own
        own, tied = own + tied, 0.0
    # ZeRO 1 scatters gradients in the last pass alone: before, they are whole.
    scatters = shards > 1 and not state.is_bitwise and (mesh.zero_stage > 1 or num_passes == 1)
    is_gathered = scatters and mesh.zero_stage == 3
    copies = 1.0 / shards if scatters else 1.0  # of the gradients of all parameters
    if state.is_bitwise:  # a gradient of the shard, and a sum for each power of two of the shards before it
        copies = 1.0 + num_passes.bit_length()
    # Parameters beside a worker's own: a shard of all; in bitwise parity all are whole at the end of backward.
    beside = 0.0 if shards == 1 or is_gathered else own / (1 if mesh.zero_stage == 3 else shards)
    root, of_root, waiting = sum(layer.root_bytes for layer in layers) if scatters else 0.0, 0.0, 0.0
    kept = waiting_bytes + sum(kept_bytes)
    whole = waiting_bytes + sum(layer.activation_bytes for layer in layers)
    moments = []  # bytes of activations, and of parameters and gradients that are gathered or in messages
    blocks, following = _blocks(layers, kept_bytes), 0.0
    sizes = [sum(layer.parameter_bytes - layer.root_bytes for layer, _ in block) for block in blocks]
    for block, size, before in reversed(list(zip(blocks, sizes, [0.0, *sizes[:-1]], strict=True))):
        if scatters:  # parameters are copied out of their message, for stages 1 and 2 in forward
            moments.append((kept, size + (size + following if is_gathered else beside)))
        done = 0.0
        for layer, its_kept in reversed(block):
            done += layer.parameter_bytes - layer.root_bytes
            moving = done + following if scatters else layer.largest_parameter_bytes
            activations = min(kept + layer.activation_bytes, whole) + layer.moment_bytes
            moments.append((activations, moving + of_root + waiting + (before + size if is_gathered else beside)))
            kept, whole, of_root = kept - its_kept, whole - layer.activation_bytes, root if is_gathered else 0.0
            waiting += (layer.root_bytes if scatters else 0.0) + (layer.tied_bytes if tied else 0.0)
        if scatters:  # forward copies parameters out, beside the message before; backward gradients into their message
            beside, following = beside - size, size
            moments.append((kept, 2 * size + before + of_root + waiting + (0.0 if is_gathered else beside)))
    # The sum of the gradients of tied parameters, or the root's gradients and their message.
    waiting += of_root + following + (2 if shards == 1 else 1) * tied
    moments.append((kept, max(2 * root, waiting) + (0.0 if is_gathered else beside)))
    activation_bytes, moving_bytes = max(moments, key=sum)
    return DeviceMemory(
        parameter_bytes=own / (shards if mesh.zero_stage == 3 else 1),
        gradient_bytes=own * copies,
        optimizer_bytes=own * state.optimizer / state.parameter / shards,
        activation_bytes=activation_bytes,
        moving_bytes=moving_bytes,
    )


def _blocks(layers: Sequence[LayerCost], kept_bytes: Sequence[float]) -> list[list[tuple[LayerCost, float]]]:
    """The layers, with what each keeps, that `parallel/sharded.py` gathers together: small neighbours."""
    found: list[list[tuple[LayerCost, float]]] = [[]]
    for pair in zip(layers, kept_bytes, strict=True):
        if sum(layer.parameter_bytes - layer.root_bytes for layer, _ in found[-1]) >= MIN_BLOCK_BYTES:
            found.append([])
        found[-1].append(pair)
    return found
