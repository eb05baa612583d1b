"""`--strategy auto`: plain replicas where they fit and nothing is clearly faster, else the fastest mesh that fits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from paceline.errors import ClusterError, JobError
from paceline.plan.collectives import Network
from paceline.plan.inputs import ForecastRequest, inside_bytes_per_s, needs_replicas, plan_inputs, search_meshes
from paceline.plan.memory import (
    device_memory,
    fits,
    parts_in_words,
    state_bytes,
    worker_memory_bytes,
    workers_on_fullest_node,
)
from paceline.plan.peak_memory import USABLE_FRACTION
from paceline.plan.search import SearchResult, Workload, search
from paceline.spec import Cluster, Job, Mesh, PipelineSpec, Plan
from paceline.spec.algorithm import AlphaBeta
from paceline.spec.cluster import DeviceKind
from paceline.spec.model_cost import Activations, DeviceMemory, ModelCost
from paceline.words import duration, size

_CLEARLY_FASTER = 0.9
"""A mesh is taken in place of replicas where its step takes at most this fraction of theirs."""
# Assumptions about hardware that was not measured; they only decide between meshes when replicas do not fit.
_FLOPS_PER_S: dict[DeviceKind, float] = {"cuda": 50e12, "cpu": 20e9}
_INSIDE_BYTES_PER_S: dict[DeviceKind, float] = {"cuda": 50e9, "cpu": 2e9}
_BETWEEN_BYTES_PER_S, _BETWEEN_ALPHA_S = 1.25e9, 30e-6
_INSIDE_ALPHA_S: dict[DeviceKind, float] = {"cuda": 5e-6, "cpu": 20e-6}
_PER_MESSAGE_S: dict[DeviceKind, float] = {"cuda": 3e-6, "cpu": 20e-6}
"""Software overhead of NCCL and Gloo per message."""


@dataclass(frozen=True)
class MeshChoice:
    """The mesh to train a model on, and why."""

    mesh: Mesh
    reason: str
    """One sentence."""
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    recompute: bool = False

    def applied(self, plan: Plan) -> Plan:
        """`plan`, which is for as many workers, with this mesh."""
        return dataclasses.replace(
            plan,
            mesh=None if self.mesh.is_plain else self.mesh,
            pipeline=self.pipeline,
            recompute=self.recompute,
        )


def choose_mesh(
    job: Job,
    model: ModelCost,
    cluster: Cluster,
    num_workers: int,
    *,
    memory_bytes: float | None = None,
    link_bytes_per_s: float | None = None,
) -> MeshChoice:
    """The best mesh of `num_workers` workers.

    Replicas fit if one virtual shard does. Where the job was probed, the fastest mesh wins if it is clearly faster;
    where it was not, replicas do if they fit.

    Args:
        model: What a trace of it told.
        memory_bytes: Memory of one worker; None: the smallest device's, on CPU its part of its node's memory.
        link_bytes_per_s: Between nodes, where no probe measured it.

    Raises:
        JobError: no mesh fits, or replicas do not and the job needs them.
    """
    plain = Mesh(dp=num_workers)
    room = memory_bytes or worker_memory_bytes(cluster, workers_on_fullest_node(cluster, num_workers))
    if num_workers == 1 or needs_replicas(job):
        check_fits(job, model, num_workers, room)
        reason = "a single worker needs no mesh" if num_workers == 1 else "this job needs whole replicas"
        return MeshChoice(plain, f"{plain}: {reason}.")
    try:
        request = ForecastRequest(link_bytes_per_s=link_bytes_per_s)
        found = search_meshes(plan_inputs(job, cluster, request, num_workers, model), num_workers, room)
        is_timed = True
    except ClusterError:  # not enough was measured
        found, is_timed = _by_assumption(job, model, cluster, num_workers, room, link_bytes_per_s), False
    winner, needed = found.winner, _replica(job, model, num_workers)
    replicas = next((one for one in found.candidates if one.mesh.is_plain), None)
    if replicas is not None and (not is_timed or winner.step_s > _CLEARLY_FASTER * replicas.step_s):
        why = f"a replica needs {size(needed.total_bytes)} of {size(room)}"
        reason = f"{why}, and no mesh is clearly faster" if is_timed else f"{why}, and no other mesh was timed"
        return MeshChoice(plain, f"{plain}: {reason}.", replicas.pipeline)
    if replicas is not None:
        reason = f"{duration(winner.step_s)} a step, and whole replicas need {duration(replicas.step_s)}"
    else:
        reason = (
            f"it needs {size(winner.memory.total_bytes)} on a worker, where {size(USABLE_FRACTION * room)} can be used "
            f"and a whole replica needs {size(needed.total_bytes)}"
        )
    return MeshChoice(winner.mesh, f"{winner.mesh}: {reason}.", winner.pipeline, winner.recompute)


def measured_model_cost(job: Job, cluster: Cluster) -> ModelCost:
    """The costs of a job's model from the probe's timing. Raises `ClusterError` if there is none."""
    known = plan_inputs(job, cluster, ForecastRequest(), 1)
    return ModelCost(known.timing.num_parameters, known.activations or Activations(0.0), known.layers)


def check_fits(job: Job, model: ModelCost, num_workers: int, memory_bytes: float) -> None:
    """Check that one virtual shard fits on each worker with the whole model.

    Raises:
        JobError: it does not; the message gives the needed and the available memory.
    """
    needed = _replica(job, model, num_workers)
    if fits(needed, memory_bytes):
        return
    raise JobError(
        f"This job does not fit: whole replicas need {size(needed.total_bytes)} on each worker "
        f"({parts_in_words(needed)}), where {size(USABLE_FRACTION * memory_bytes)} can be used; let strategy = 'auto' "
        "choose, name fsdp, pp or a mesh of more workers, or set virtual_shards higher."
    )


def _replica(job: Job, model: ModelCost, num_workers: int) -> DeviceMemory:
    """The memory of a device with the whole model and one virtual shard at a time."""
    return device_memory(
        model.num_parameters,
        state_bytes(job),
        Mesh(dp=num_workers),
        model.activations,
        job.shard_size,
        num_micro_batches=-(-job.virtual_shards // num_workers),
        layers=model.layers,
    )


def _by_assumption(
    job: Job, model: ModelCost, cluster: Cluster, num_workers: int, room: float, link_bytes_per_s: float | None
) -> SearchResult:
    kind = cluster.device_kind
    on_node = -(-num_workers // len(cluster.nodes))
    inside = AlphaBeta(_INSIDE_ALPHA_S[kind], 1 / (inside_bytes_per_s(cluster.nodes[0]) or _INSIDE_BYTES_PER_S[kind]))
    between = AlphaBeta(_BETWEEN_ALPHA_S, 1 / (link_bytes_per_s or _BETWEEN_BYTES_PER_S))
    workload = Workload(
        num_parameters=model.num_parameters,
        global_batch_size=job.global_batch_size,
        state=state_bytes(job),
        activations=model.activations,
        compute_s=lambda samples: samples * model.flops_per_sample / _FLOPS_PER_S[kind],
        memory_bytes=room,
        layers=model.layers,
        shard_size=job.shard_size,
        backend="nccl" if kind == "cuda" else "gloo",
        sums_are_hidden=job.parity == "numeric",
    )
    return search(workload, num_workers, on_node, Network(inside, between, _PER_MESSAGE_S[kind]))
