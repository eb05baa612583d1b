"""Which mesh trains a model fastest on so many devices: data, sharded, pipeline and tensor parallelism, and mixtures.

All meshes are listed, those that do not fit into memory are pruned, the rest are priced, and the winner and the
runner-up are explained. Prices are those of `parallel`: gradients of replicas travel while backward computes, and a
pipeline's micro-batches are the virtual shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from paceline.errors import JobError
from paceline.plan.collectives import Cost, all_reduce, ring, tree_exact
from paceline.plan.memory import USABLE_FRACTION, DeviceMemory, fits, job_memory
from paceline.plan.step_model import StepForecast, network_at, pass_at
from paceline.spec import Job, Mesh
from paceline.spec.algorithm import BUCKET_BYTES, MIN_BLOCK_BYTES
from paceline.spec.forecast import Layers, ModelCost
from paceline.spec.plan import check_mesh
from paceline.words import duration, number_of, size

_CLOSE = 1.03
"""Meshes whose steps are within 3 % of the fastest one's are as good; the simplest of them wins."""
_RECOMPUTE_FACTOR = 4 / 3
"""Forward once more, where backward takes twice as long as forward (Chen et al. 2016, "Sublinear Memory Cost")."""
_BACKWARD_FRACTION = 2 / 3
"""The fraction of a pass that backward takes: it multiplies twice where forward multiplies once."""


@dataclass(frozen=True)
class Workload:
    """A job's model on so many devices: all on which the choice of a mesh depends."""

    job: Job
    model: ModelCost
    """Without layers only data parallelism and sharding are possible."""
    num_workers: int
    devices_per_node: int
    memory_bytes: float
    """Memory of one device."""
    constants: Mapping[str, float]
    """The constants of the step model."""


@dataclass(frozen=True)
class MeshCandidate:
    """One mesh that fits; the parts of a step add up to it."""

    mesh: Mesh
    num_micro_batches: int
    """Micro-batches of the worker with the largest assignment; each is a virtual shard."""
    memory: DeviceMemory
    recompute: bool
    compute_s: float
    bubble_s: float
    """Stages that wait for the first micro-batches to come and the last ones to go."""
    tensor_s: float
    """Sums inside of layers and messages between stages: nothing hides them."""
    exposed_s: float
    """Sums of gradients, and gathering of sharded parameters, as far as compute does not hide them."""
    optimizer_s: float
    """Updates of what the device holds the optimizer's state of."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.bubble_s + self.tensor_s + self.exposed_s + self.optimizer_s

    def in_words(self) -> str:
        """How fast it is, how long it waits, and what it holds."""
        again = ", activations computed again" if self.recompute else ""
        return (
            f"{self.mesh}: {duration(self.step_s)} a step, {duration(self.step_s - self.compute_s)} of it not compute; "
            f"{number_of(self.num_micro_batches, 'virtual shard')} a worker{again}; it holds "
            f"{size(self.memory.total_bytes)}"
        )

    def forecast_like(self, replicas: StepForecast) -> StepForecast:
        """Its step; the interval is as wide as for replicas."""
        return StepForecast(
            step_s=self.step_s,
            compute_s=self.compute_s,
            communication_s=self.tensor_s + self.exposed_s,
            overhead_s=self.optimizer_s,
            low_s=self.step_s * replicas.low_s / replicas.step_s,
            high_s=self.step_s * replicas.high_s / replicas.step_s,
        )


def needs_replicas(job: Job) -> bool:
    """Whether only workers with the whole model can train it."""
    try:
        check_mesh(job, Mesh(pp=2))
    except JobError:
        return True
    return job.aggregation.wire == "auto-lossy"


def search(workload: Workload) -> tuple[MeshCandidate, ...]:
    """The meshes that fit, one at least, in the order of their steps; of nearly equal ones the simplest is first.

    Activations are computed again only where a mesh does not fit without, and never on plain replicas, which cannot.
    Raises `JobError` where none of them fits; the message says how much the thriftiest one would need.
    """
    job, model, num_workers = workload.job, workload.model, workload.num_workers
    candidates: list[MeshCandidate] = []
    too_large: list[tuple[float, Mesh]] = []
    plain = [Mesh(dp=num_workers)] if num_workers <= job.virtual_shards else []
    for mesh in plain if needs_replicas(job) else _meshes(job, num_workers, workload.devices_per_node, model.layers):
        for recompute in (False, True) if model.layers and not mesh.is_plain else (False,):
            memory = job_memory(job, model, mesh, recompute)
            if fits(memory.total_bytes, workload.memory_bytes):
                candidates.append(_priced(workload, mesh, memory, recompute))
                break
            too_large.append((memory.total_bytes, mesh))
    if not candidates:
        reason = f"they cannot share virtual_shards = {job.virtual_shards}"
        if too_large:
            needed, mesh = min(too_large, key=lambda one: one[0])
            usable = size(USABLE_FRACTION * workload.memory_bytes)
            reason = f"{mesh} needs the least, {size(needed)} a device, of which {usable} can be used"
        raise JobError(
            f"This job fits into no mesh of {number_of(num_workers, 'device')}: {reason}; take another number of "
            "devices, more virtual shards or a smaller model."
        )
    fastest_s = min(candidate.step_s for candidate in candidates)

    def order(one: MeshCandidate) -> tuple[float, ...]:
        is_close, mesh = one.step_s <= _CLOSE * fastest_s, one.mesh
        return (0, mesh.pp, mesh.tp, mesh.fsdp, mesh.zero_stage) if is_close else (1, one.step_s)

    return tuple(sorted(candidates, key=order))


def _meshes(job: Job, num_workers: int, devices_per_node: int, layers: Layers) -> Iterator[Mesh]:
    """Every mesh of so many devices that can train the job: tensor groups lie evenly in nodes, or nodes in them; each
    stage begins with a layer that may begin one."""
    most_stages = 1 + sum(layer.may_begin for layer in layers[1:])
    # Where a layer is divided, sums have other bits: nobody gets those without asking for them.
    degrees = [one for one in range(1, num_workers + 1) if num_workers % one == 0]
    for tp in degrees if job.parity == "numeric" else [1]:
        is_even = devices_per_node % tp == 0 or tp % devices_per_node == 0
        if tp > 1 and not (is_even and any(layer.tensor_shards(tp) > 1 for layer in layers)):
            continue
        for pp, fsdp in product(degrees, repeat=2):
            dp, rest = divmod(num_workers, tp * pp * fsdp)
            if rest == 0 and pp <= most_stages and dp * fsdp <= job.virtual_shards:
                for zero_stage in (1, 2, 3) if fsdp > 1 else (3,):
                    yield Mesh(dp, fsdp, tp, pp, zero_stage)


def _priced(workload: Workload, mesh: Mesh, memory: DeviceMemory, recompute: bool) -> MeshCandidate:
    """The seconds of a step. A pipeline of p stages takes m + p - 1 turns for m micro-batches (Huang et al. 2019,
    "GPipe")."""
    job, m = workload.job, -(-workload.job.virtual_shards // mesh.num_assignments)
    of_stages = [sum(layer.time_s / layer.tensor_shards(mesh.tp) for layer in stage) for stage in memory.stages]
    busiest = max(of_stages) / (sum(layer.time_s for stage in memory.stages for layer in stage) or 1.0)
    samples = job.global_batch_size / job.virtual_shards
    turn_s = float(pass_at(workload.constants, samples, workload.devices_per_node)) * busiest
    if recompute:
        turn_s *= _RECOMPUTE_FACTOR
    own_bytes = memory.parameter_bytes * (mesh.fsdp if mesh.zero_stage == 3 else 1)
    return MeshCandidate(
        mesh,
        m,
        memory,
        recompute,
        compute_s=m * turn_s,
        bubble_s=(mesh.pp - 1) * turn_s,
        tensor_s=(m + mesh.pp - 1) * _inside_model_s(workload, mesh, memory.stages),
        exposed_s=_exposed_s(workload, mesh, own_bytes, m, turn_s),
        optimizer_s=workload.constants["update_s"] * mesh.dp / mesh.num_workers,
    )


def _inside_model_s(workload: Workload, mesh: Mesh, stages: tuple[Layers, ...]) -> float:
    """Seconds of one micro-batch's sums inside of layers and its messages to the next stage, forward and backward."""
    seconds, samples = 0.0, workload.job.shard_size
    network = network_at(workload.constants, workload.devices_per_node)
    for divided in ([layer for layer in stage if layer.tensor_shards(mesh.tp) > 1] for stage in stages):
        if num_sums := sum(layer.num_all_reduces for layer in divided):
            sum_bytes = samples * sum(layer.num_all_reduces * layer.output_bytes for layer in divided) / num_sums
            seconds = max(seconds, num_sums * _sum_s(workload, sum_bytes, mesh.tp, 1))
    if mesh.pp > 1:
        message_bytes = samples * max(stage[-1].output_bytes for stage in stages[:-1])
        if mesh.num_workers <= workload.devices_per_node:
            return seconds + 2 * network.inside_s(message_bytes)
        # Stages are farthest apart: the slowest of their links is one between nodes, which its workers share.
        sharing = min(workload.devices_per_node, mesh.tp * mesh.num_assignments)
        seconds += 2 * network.between_s(sharing * message_bytes)
    return seconds


def _exposed_s(workload: Workload, mesh: Mesh, own_bytes: float, num_passes: int, turn_s: float) -> float:
    """What computing does not hide of adding up gradients of `own_bytes` over replicas, and of gathering parameters and
    scattering gradients over the fsdp axis, each half an all_reduce by a ring.

    ZeRO stage 1 gathers and scatters once a step, stage 2 in every pass, and stage 3 gathers again for backward
    (Rajbhandari et al. 2020, section 7). In bitwise parity nothing scatters: gradients are whole, and are summed when
    all is computed.

    All of it travels behind the last backward pass but the last bucket of gradients (Zhang et al. 2017, "Poseidon",
    wait-free backpropagation), and blocks of parameters behind earlier passes too, but for stage 1 of ZeRO.
    """
    is_bitwise = workload.job.parity == "bitwise"
    num_blocks = max(1, min(len(workload.model.layers) // mesh.pp or 1, int(own_bytes / MIN_BLOCK_BYTES)))
    ring_s = num_blocks * _sum_s(workload, own_bytes / num_blocks, mesh.fsdp, mesh.tp, ring)
    num_gathers = 1 if mesh.zero_stage == 1 else num_passes
    if is_bitwise:
        return num_gathers * ring_s / 2 + _sum_s(workload, own_bytes, mesh.num_assignments, mesh.tp, tree_exact)
    num_buckets = math.ceil(own_bytes / mesh.fsdp / BUCKET_BYTES) or 1
    bucket_s = _sum_s(workload, own_bytes / mesh.fsdp / num_buckets, mesh.dp, mesh.tp * mesh.fsdp)
    backward_s = _BACKWARD_FRACTION * turn_s
    sharding_s = (3 if mesh.zero_stage == 3 else 2) * num_gathers * ring_s / 2
    if mesh.zero_stage > 1:
        sharding_s = max(0.0, sharding_s - (num_passes - 1) * turn_s)
    last_s = ring_s / num_blocks / 2 + bucket_s  # of gradients, which are there when backward ends
    return max(last_s, sharding_s + num_buckets * bucket_s - backward_s)


def _sum_s(workload: Workload, size_bytes: float, degree: int, stride: int, cost: Cost = all_reduce) -> float:
    """One all_reduce over ranks that are `stride` apart: the groups of a node's other ranks share its link."""
    if degree == 1 or not size_bytes:
        return 0.0
    on_node = workload.devices_per_node
    network = network_at(workload.constants, on_node)
    on_a_node = max(1, min(degree, on_node // stride))
    shared = replace(network, between_beta_s_per_byte=network.between_beta_s_per_byte * on_node / on_a_node)
    return float(cost(size_bytes, (on_a_node,) * -(-degree // on_a_node), shared))
