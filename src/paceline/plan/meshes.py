"""Which mesh trains a model fastest on so many devices: data, sharded, pipeline and tensor parallelism, and mixtures.

All meshes are listed, those that do not fit into memory are pruned, the rest are priced, and the winner and the
runner-up are explained. Prices are those of `parallel`: gradients of replicas travel while backward computes,
and a pipeline's micro-batches are the virtual shards. `strategy = "auto"` takes plain replicas where they fit and
nothing is clearly faster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.errors import ClusterError, JobError
from paceline.plan.collectives import Cost, Network, all_reduce, ring, tree_exact
from paceline.plan.inputs import ForecastRequest, PlanInputs, plan_inputs
from paceline.plan.memory import (
    USABLE_FRACTION,
    DeviceMemory,
    fits,
    job_memory,
    state_bytes,
    worker_memory_bytes,
)
from paceline.plan.step_model import network_at
from paceline.spec import Cluster, Job, Mesh
from paceline.spec.algorithm import BUCKET_BYTES, MIN_BLOCK_BYTES
from paceline.spec.model_cost import LayerCost, Layers, ModelCost
from paceline.spec.plan import check_mesh
from paceline.words import duration, number_of, size

_CLOSE = 1.03
"""Meshes whose steps are within 3 % of the fastest one's are as good; the simplest of them wins."""
_CLEARLY_FASTER = 0.9
"""A mesh is taken in place of replicas where its step takes at most this fraction of theirs."""
_RECOMPUTE_FACTOR = 4 / 3
"""Forward once more, where backward takes twice as long as forward (Chen et al. 2016, "Sublinear Memory Cost")."""
_BACKWARD_FRACTION = 2 / 3
"""The fraction of a pass that backward takes: it multiplies twice where forward multiplies once."""
_WORTH_SHARING = 0.5
"""A tensor group pays where it divides at least this fraction of the computing."""


@dataclass(frozen=True)
class Workload:
    """A job's model on devices: all on which the choice of a mesh depends."""

    job: Job
    model: ModelCost
    """Without layers only data parallelism and sharding are possible."""
    compute_s: Callable[[float], float]
    """Seconds of a forward and backward pass of the whole model over so many samples on one device."""
    memory_bytes: float
    """Memory of one device."""
    devices_per_node: int
    network: Network
    optimizer_s: float = 0.0
    """Seconds in which one device updates the whole model."""
    is_gloo: bool = False
    """With Gloo nothing hides what the fsdp axis says, and a reduce_scatter moves as much as an all_reduce: counted
    between two nodes with torch 2.13, (n - 1)/n of a vector for an all_gather, 2 (n - 1)/n for the other two."""

    def num_micro_batches(self, mesh: Mesh) -> int:
        """Of the worker with the largest assignment; a micro-batch is a virtual shard."""
        return -(-self.job.virtual_shards // mesh.num_assignments)


@dataclass(frozen=True)
class MeshCandidate:
    """One mesh that fits; the parts of a step add up to it."""

    mesh: Mesh
    micro_batch_size: int
    num_micro_batches: int
    memory: DeviceMemory
    recompute: bool
    compute_s: float
    bubble_s: float
    """Stages that wait for the first micro-batches to come and the last ones to go."""
    tensor_s: float
    """Sums inside of layers and messages between stages: nothing hides them."""
    exposed_s: float
    """What compute does not hide of gradients, and of parameters where they are sharded."""
    optimizer_s: float
    """Updates of what the device holds the optimizer's state of."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.bubble_s + self.tensor_s + self.exposed_s + self.optimizer_s

    def in_words(self) -> str:
        """How fast it is, how long it waits, and what it holds."""
        again = ", activations computed again" if self.recompute else ""
        return (
            f"{self.mesh}: {duration(self.step_s)} a step, of which {duration(self.step_s - self.compute_s)} are no "
            f"computing; {self.num_micro_batches} x {self.micro_batch_size} samples a worker{again}; it holds "
            f"{size(self.memory.total_bytes)}"
        )


def search(workload: Workload, num_workers: int) -> tuple[MeshCandidate, ...]:
    """The meshes of `num_workers` devices that fit, one at least, in the order of their steps; of nearly equal ones the
    simplest is first.

    Activations are computed again only where a mesh does not fit without, and never on plain replicas, which cannot.

    Raises:
        JobError: none of them fits; the message says how much the thriftiest one would need.
    """
    job, model = workload.job, workload.model
    candidates: list[MeshCandidate] = []
    too_large: list[tuple[Mesh, DeviceMemory]] = []
    for mesh in _meshes(num_workers, workload.devices_per_node, model.layers):
        if mesh.num_assignments > job.virtual_shards or (job.parity == "bitwise" and mesh.tp > 1):
            continue  # where a layer is divided, sums have other bits: nobody gets those without asking for them
        for recompute in (False, True) if model.layers and not mesh.is_plain else (False,):
            memory = job_memory(job, model, mesh, recompute)
            if fits(memory, workload.memory_bytes):
                candidates.append(_priced(workload, mesh, memory, recompute))
                break
        else:
            too_large.append((mesh, memory))
    if not candidates and not too_large:
        raise JobError(
            f"{num_workers} workers cannot share virtual_shards = {job.virtual_shards}; use fewer workers or more "
            "virtual shards."
        )
    if not candidates:
        mesh, memory = min(too_large, key=lambda one: one[1].total_bytes)
        raise JobError(
            f"This job fits into no mesh of {number_of(num_workers, 'device')}: {mesh} needs the least, "
            f"{size(memory.total_bytes)} a device, and {size(USABLE_FRACTION * workload.memory_bytes)} can be used; "
            "take more devices or a smaller model."
        )
    candidates.sort(key=lambda candidate: candidate.step_s)
    close = [one for one in candidates if one.step_s <= _CLOSE * candidates[0].step_s]
    close.sort(key=lambda one: (one.mesh.pp, one.mesh.tp, one.mesh.fsdp, one.mesh.zero_stage))
    return (*close, *candidates[len(close) :])


def _meshes(num_workers: int, devices_per_node: int, layers: Layers) -> Iterator[Mesh]:
    """Every mesh of so many devices: tensor groups lie evenly in nodes, or nodes in them, and divide most layers
    evenly; each stage begins with a layer that may begin one."""
    most_stages = 1 + sum(layer.may_begin for layer in layers[1:])
    total_s = sum(layer.time_s for layer in layers)
    for tp in _divisors(num_workers):
        divided_s = sum(layer.time_s for layer in layers if layer.is_sharded_by(tp))
        is_even = devices_per_node % tp == 0 or tp % devices_per_node == 0
        if tp > 1 and not (is_even and divided_s > _WORTH_SHARING * total_s):
            continue
        for pp in _divisors(num_workers // tp):
            if pp > most_stages:
                continue
            for fsdp in _divisors(num_workers // tp // pp):
                dp = num_workers // tp // pp // fsdp
                for stage in (1, 2, 3) if fsdp > 1 else (3,):
                    yield Mesh(dp=dp, fsdp=fsdp, tp=tp, pp=pp, zero_stage=stage)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def num_gathers_and_scatters(zero_stage: int, num_passes: int, is_bitwise: bool = False) -> tuple[int, int]:
    """How often a step gathers parameters and scatters gradients along fsdp (Rajbhandari et al. 2020, section 7).

    Stage 1 does both once a step, stage 2 in every pass, and stage 3 gathers again for backward. In bitwise parity
    gradients are whole, so that nothing scatters them and a pass gathers once.
    """
    if is_bitwise:
        return (1 if zero_stage == 1 else num_passes), 0
    return {1: (1, 1), 2: (num_passes, num_passes), 3: (2 * num_passes, num_passes)}[zero_stage]


def _priced(workload: Workload, mesh: Mesh, memory: DeviceMemory, recompute: bool) -> MeshCandidate:
    """The seconds of a step. A pipeline of p stages takes m + p - 1 turns for m micro-batches (Huang et al. 2019,
    "GPipe")."""
    job, m = workload.job, workload.num_micro_batches(mesh)

    def largest_part(of: Callable[[LayerCost], float]) -> float:
        """The largest amount of a stage, as a fraction of the total of all layers; tensor parallelism divides it."""
        most = max(sum(of(layer) / layer.tensor_shards(mesh.tp) for layer in stage) for stage in memory.stages)
        return most / (sum(of(layer) for stage in memory.stages for layer in stage) or 1.0)

    busiest = largest_part(lambda layer: layer.time_s) * (_RECOMPUTE_FACTOR if recompute else 1.0)
    held = largest_part(lambda layer: layer.parameter_bytes)
    turn_s = workload.compute_s(job.global_batch_size / job.virtual_shards) * busiest
    own_bytes = workload.model.num_parameters * state_bytes(job).gradient * held
    sharding_s = _sharding_s(workload, mesh, own_bytes, m * turn_s if mesh.zero_stage >= 2 else turn_s)
    return MeshCandidate(
        mesh,
        job.shard_size,
        m,
        memory,
        recompute,
        compute_s=m * turn_s,
        bubble_s=(mesh.pp - 1) * turn_s,
        tensor_s=(m + mesh.pp - 1) * _inside_model_s(workload, mesh, memory.stages),
        exposed_s=sharding_s + _replicas_s(workload, mesh, own_bytes, turn_s),
        optimizer_s=workload.optimizer_s * held / mesh.fsdp,
    )


def _inside_model_s(workload: Workload, mesh: Mesh, stages: tuple[Layers, ...]) -> float:
    """What one micro-batch's sums inside of layers and messages to the next stage take, forward and backward."""
    seconds, samples, level = 0.0, workload.job.shard_size, workload.network.inside
    if mesh.tp > 1:
        layer_s = {  # most layers of a model are alike
            layer: layer.num_all_reduces * _sum_s(workload, mesh, samples * layer.all_reduce_bytes, mesh.tp, 1)
            for layer in set(workload.model.layers)
        }
        seconds += max(sum(layer_s[layer] for layer in stage if layer.is_sharded_by(mesh.tp)) for stage in stages)
    if mesh.pp > 1:
        message_bytes = samples * max(stage[-1].output_bytes for stage in stages[:-1])
        if mesh.num_workers > workload.devices_per_node:
            # Stages are farthest apart: the slowest of their links is one between nodes, which its workers share.
            level = workload.network.between
            message_bytes *= min(workload.devices_per_node, mesh.tp * mesh.num_assignments)
        seconds += 2 * level.seconds(message_bytes)
    return seconds


def _replicas_s(workload: Workload, mesh: Mesh, own_bytes: float, turn_s: float) -> float:
    """What the last micro-batch's computing does not hide of adding up gradients over replicas."""
    if workload.job.parity == "bitwise":  # whole gradients, whatever is sharded, when all is computed
        return _sum_s(workload, mesh, own_bytes, mesh.num_assignments, mesh.tp, tree_exact)
    num_buckets = _num_buckets(own_bytes / mesh.fsdp)
    bucket_s = _sum_s(workload, mesh, own_bytes / mesh.fsdp / num_buckets, mesh.dp, mesh.tp * mesh.fsdp)
    return _exposed_s(turn_s, num_buckets, num_buckets * bucket_s)


def _sharding_s(workload: Workload, mesh: Mesh, own_bytes: float, hiding_s: float) -> float:
    """What computing of `hiding_s` does not hide of gathering parameters and scattering gradients over the fsdp axis.

    A gather is half an all_reduce by a ring, and so is a scatter where the backend has one. Blocks are gathered one by
    one: a layer, or small ones together.
    """
    if mesh.fsdp == 1:
        return 0.0
    num_blocks = _num_buckets(own_bytes)
    if layers := workload.model.layers:
        num_blocks = max(1, min(-(-len(layers) // mesh.pp), int(own_bytes / MIN_BLOCK_BYTES)))
    all_reduce_s = num_blocks * _sum_s(workload, mesh, own_bytes / num_blocks, mesh.fsdp, mesh.tp, ring)
    is_bitwise = workload.job.parity == "bitwise"
    gathers, scatters = num_gathers_and_scatters(mesh.zero_stage, workload.num_micro_batches(mesh), is_bitwise)
    if workload.is_gloo:
        return all_reduce_s * (gathers / 2 + scatters)
    return _exposed_s(hiding_s, _num_buckets(own_bytes), all_reduce_s * (gathers + scatters) / 2)


def _sum_s(
    workload: Workload, mesh: Mesh, size_bytes: float, degree: int, stride: int, cost: Cost = all_reduce
) -> float:
    """One all_reduce over ranks that are `stride` apart: the groups of a node's other ranks share its link."""
    if degree == 1 or not size_bytes:
        return 0.0
    on_node, between = workload.devices_per_node, workload.network.between
    on_a_node = max(1, min(degree, on_node // stride))
    full, rest = divmod(degree, on_a_node)
    sharing = max(1.0, min(on_node, mesh.num_workers) / on_a_node)
    shared = dataclasses.replace(between, beta_s_per_byte=between.beta_s_per_byte * sharing)
    workers = (on_a_node,) * full + ((rest,) if rest else ())
    return float(cost(size_bytes, workers, dataclasses.replace(workload.network, between=shared)))


def _num_buckets(size_bytes: float) -> int:
    return max(1, math.ceil(size_bytes / BUCKET_BYTES))


def _exposed_s(compute_s: float, num_buckets: int, all_sums_s: float) -> float:
    """The part of `all_sums_s` that is exposed after the end of a pass of `compute_s`.

    Bucket j of n is ready after forward and j / n of backward, and is sent when those before it have arrived (Zhang et
    al. 2017, "Poseidon", wait-free backpropagation). So either each transfer ends before the next bucket is ready, and
    only the last one is exposed, or the link is never idle after the first bucket is ready.
    """
    behind_first_s = compute_s * _BACKWARD_FRACTION * (num_buckets - 1) / num_buckets
    return max(all_sums_s / num_buckets, all_sums_s - behind_first_s)


# --- which one to train on ---


@dataclass(frozen=True)
class MeshChoice:
    """The mesh to train a model on, and why."""

    mesh: Mesh | None
    """None: whole replicas."""
    reason: str
    """One sentence."""
    recompute: bool = False


def needs_replicas(job: Job) -> bool:
    """Whether only workers with the whole model can train it."""
    try:
        check_mesh(job, Mesh(fsdp=2))
    except JobError:
        return True
    return job.aggregation.wire == "auto-lossy"


def search_meshes(inputs: PlanInputs, num_workers: int) -> tuple[MeshCandidate, ...]:
    """What `search` finds, by the steps that were timed."""
    most_on_node, constants = max(inputs.layout(num_workers)), inputs.fit.typical()
    slowdown = 1 + constants["neighbour_slowdown"] * (1 - 1 / most_on_node)
    workload = Workload(
        inputs.job_on(num_workers),
        inputs.model,
        compute_s=lambda samples: (constants["fixed_s"] + constants["per_sample_s"] * samples) * slowdown,
        memory_bytes=inputs.worker_bytes(num_workers),
        devices_per_node=most_on_node,
        network=network_at(constants, most_on_node),
        optimizer_s=constants["update_s"],
        is_gloo=inputs.cluster.device_kind != "cuda",
    )
    return search(workload, num_workers)


def choose_mesh(job: Job, model: ModelCost, cluster: Cluster, num_workers: int) -> MeshChoice:
    """The best mesh of `num_workers` workers.

    Where the job was probed, the fastest mesh wins if it is clearly faster than replicas; where it was not, replicas do
    if they fit, else parameters are sharded over all workers.

    Args:
        model: What a trace of it told.

    Raises:
        JobError: no mesh fits, or replicas do not and the job needs them.
    """
    plain, must_be_plain = Mesh(dp=num_workers), num_workers == 1 or needs_replicas(job)
    most_on_node = max(min(num_workers, len(cluster.nodes[0].devices)), -(-num_workers // len(cluster.nodes)))
    memory_bytes = worker_memory_bytes(cluster, most_on_node)
    memory, usable = job_memory(job, model, plain), size(USABLE_FRACTION * memory_bytes)
    needed = f"a whole replica needs {size(memory.total_bytes)}"
    if must_be_plain and not fits(memory, memory_bytes):
        raise JobError(
            f"This job does not fit: {needed}, where {usable} of a worker can be used; set virtual_shards higher."
        )
    if must_be_plain:
        reason = "a single worker needs no mesh" if num_workers == 1 else "this job needs whole replicas"
        return MeshChoice(None, f"{plain}: {reason}.")
    try:
        found = search_meshes(plan_inputs(job, cluster, ForecastRequest(), num_workers, model), num_workers)
    except ClusterError:  # not enough was measured: replicas, else what shards most of them
        if fits(memory, memory_bytes):
            return MeshChoice(None, f"{plain}: {needed} of {size(memory_bytes)}, and no other mesh was timed.")
        sharded = Mesh(fsdp=num_workers)
        for again in (False, True) if model.layers else (False,):
            if fits(job_memory(job, model, sharded, again), memory_bytes):
                return MeshChoice(sharded, f"{sharded}: {needed}, where {usable} of a worker can be used.", again)
        raise
    winner, replicas = found[0], next((one for one in found if one.mesh.is_plain), None)
    if replicas is not None and winner.step_s > _CLEARLY_FASTER * replicas.step_s:
        return MeshChoice(None, f"{plain}: {needed} of {size(memory_bytes)}, and no mesh is clearly faster.")
    reason = f"it needs {size(winner.memory.total_bytes)}, where {usable} of a worker can be used and {needed}"
    if replicas is not None:
        reason = f"{duration(winner.step_s)} a step, and whole replicas need {duration(replicas.step_s)}"
    return MeshChoice(winner.mesh, f"{winner.mesh}: {reason}.", winner.recompute)
