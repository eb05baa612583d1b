"""The forecast of one number of devices: how its workers pass, sum, load and update, and how long that takes."""

from __future__ import annotations

import dataclasses
import math

from paceline.errors import JobError
from paceline.plan.collectives import ring
from paceline.plan.gradient_sums import (
    STRAGGLER_SPREAD,
    chosen_algorithm,
    exposed_sums_s,
    neighbours_factor_of,
    network_in_steps,
    sums_are_hidden,
)
from paceline.plan.inputs import PlanInputs, largest_assignment, needs_replicas, pass_s, spread_of_passes
from paceline.plan.memory import device_memory, state_bytes, worker_memory_bytes
from paceline.plan.model import Layout
from paceline.plan.peak_memory import USABLE_FRACTION, StateBytes
from paceline.plan.search import SearchResult, Workload, search
from paceline.plan.step_time import INTERVAL_SIGMAS, bound_by, expected_maximum, slowest_s
from paceline.spec import Job, Mesh
from paceline.spec.forecast import ForecastRow
from paceline.spec.model_cost import Activations
from paceline.words import size

STEP_OVERHEAD_S = 3e-4
"""Seconds per step besides the optimizer: launching it, counting samples, schedules."""
MEMORY_RATE = {"cuda": 800e9, "cpu": 8e9}
"""Bytes/s at which one worker's optimizer goes through parameters, gradients and state, where it was not timed."""
_COPY_RATE = 0.5e9
"""Bytes/s at which one CPU worker copies what FSDP and Gloo exchange, where that was not timed."""
_COMPUTE_ERROR, _COMMUNICATION_ERROR, _UNSEEN_ERROR = 0.05, 0.2, 0.03
"""Standard deviations of logarithms: of measured compute, of priced communication, and for each doubling of devices
beyond those that were measured."""


def forecast_row(inputs: PlanInputs, count: int) -> ForecastRow:
    """The row of `count` devices, without what compares it with others; where replicas do not fit, that of a mesh."""
    job, layout, timing = inputs.job_on(count), inputs.layout(count), inputs.timing
    samples, shard, num_shards = largest_assignment(job, count)
    micro_batch_size, num_passes = shard, num_shards
    objection = _why_no_shard_fits(inputs, count, shard, num_shards)
    neighbours = neighbours_factor_of(inputs, layout)
    lone_pass_s = samples / num_passes * (pass_s(timing, micro_batch_size) / micro_batch_size)
    algorithm, communication_s = chosen_algorithm(inputs, job, layout)
    exposed_s = exposed_sums_s(inputs, lone_pass_s * neighbours, communication_s, layout)
    compute_s = num_passes * lone_pass_s * neighbours
    waiting_s = slowest_s(compute_s, STRAGGLER_SPREAD, expected_maximum(count)) - compute_s
    overhead_s = waiting_s + overhead_beside_passes_s(inputs, job, layout)
    loader_s = _loader_s(inputs, samples, neighbours)
    busy_s = compute_s + exposed_s + overhead_s
    step_s = busy_s + loader_s if timing.loads_between_passes else max(busy_s, loader_s)
    spread = spread_of_passes(timing, micro_batch_size)
    width = math.exp(INTERVAL_SIGMAS * _error(inputs, count, spread, exposed_s / step_s))
    row = ForecastRow(
        devices=count,
        nodes=layout.num_nodes,
        algorithm=algorithm,
        global_batch_size=job.global_batch_size,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_passes,
        step_s=step_s,
        compute_s=compute_s,
        communication_s=communication_s,
        exposed_s=exposed_s,
        loader_s=loader_s,
        overhead_s=overhead_s,
        bound_by=bound_by(compute_s, communication_s, loader_s, overhead_s, step_s, timing.loads_between_passes),
        low_s=step_s / width,
        high_s=step_s * width,
        samples_per_s=job.global_batch_size / step_s,
        speedup=1.0,
        efficiency=1.0,
        memory_bytes=_replica_bytes(inputs, count, micro_batch_size, num_passes),
        objection=objection or _too_many_workers(job, count),
    )
    return _on_a_mesh(inputs, row) if objection and count > 1 and not needs_replicas(job) else row


def _on_a_mesh(inputs: PlanInputs, row: ForecastRow) -> ForecastRow:
    """`row`, whose replicas do not fit, with the step of the best mesh that does; itself if none does."""
    try:
        best = search_meshes(inputs, row.devices).winner
    except JobError:
        return row
    step_s = best.step_s - best.optimizer_s + row.overhead_s
    communication_s = best.tensor_s + best.exposed_s
    return dataclasses.replace(
        row,
        micro_batch_size=best.micro_batch_size,
        num_micro_batches=best.num_micro_batches,
        step_s=step_s,
        compute_s=best.compute_s,
        communication_s=communication_s,
        exposed_s=communication_s + best.bubble_s,
        bound_by=bound_by(best.compute_s, communication_s, row.loader_s, row.overhead_s, step_s),
        low_s=step_s * row.low_s / row.step_s,
        high_s=step_s * row.high_s / row.step_s,
        samples_per_s=row.global_batch_size / step_s,
        memory_bytes=best.memory.total_bytes,
        objection=_too_many_workers(inputs.job_on(row.devices), row.devices),
    )


def search_meshes(inputs: PlanInputs, count: int, memory_bytes: float | None = None) -> SearchResult:
    """The meshes of `count` devices, each with `memory_bytes`. Raises `JobError` where none fits."""
    layout = inputs.layout(count)
    workload = workload_on(inputs, count, memory_bytes)
    return search(workload, count, max(layout.workers_per_node), network_in_steps(inputs, layout))


def workload_on(inputs: PlanInputs, count: int, memory_bytes: float | None = None) -> Workload:
    """The workload for a search among meshes of `count` devices.

    Args:
        memory_bytes: memory of one worker; None: its device's, or on CPU its fraction of its node's memory.
    """
    job, layout, cluster = inputs.job_on(count), inputs.layout(count), inputs.cluster
    neighbours = neighbours_factor_of(inputs, layout)
    return Workload(
        num_parameters=inputs.timing.num_parameters,
        global_batch_size=job.global_batch_size,
        state=state_bytes(job),
        activations=inputs.activations or Activations(0.0),
        compute_s=lambda samples: pass_s(inputs.timing, samples) * neighbours,
        optimizer_s=_update_s(inputs, job),
        memory_bytes=memory_bytes or worker_memory_bytes(cluster, max(layout.workers_per_node)) or math.inf,
        layers=inputs.layers,
        shard_size=job.shard_size,
        backend="nccl" if cluster.device_kind == "cuda" else "gloo",
        copy_s_per_byte=_copy_s_per_byte(inputs, layout),
        sums_are_hidden=sums_are_hidden(inputs, layout),
        plain_sums_s=chosen_algorithm(inputs, job, layout)[1],
    )


def _copy_s_per_byte(inputs: PlanInputs, layout: Layout) -> float:
    """What a byte that the fsdp axis gathers or scatters costs on CPUs besides what its link is priced at: its copies
    into memory that the kernel gives page by page."""
    timing = inputs.timing
    if inputs.cluster.device_kind == "cuda":
        return 0.0
    neighbours = neighbours_factor_of(inputs, layout)
    timed = timing.sharding
    if timed is None:
        return neighbours / _COPY_RATE
    together = inputs.layout(timing.workers_together)
    network = network_in_steps(inputs, together)
    all_reduce_s = ring(timed.num_bytes, Layout((timing.workers_together_on_node,)), network)
    # As `MeshPrices` prices a gather and a scatter by Gloo.
    copies_s = max(0.0, timed.gather_s + timed.scatter_s - 1.5 * all_reduce_s)
    return copies_s / (2 * timed.num_bytes) * neighbours / neighbours_factor_of(inputs, together)


def overhead_beside_passes_s(inputs: PlanInputs, job: Job, layout: Layout) -> float:
    """Seconds of a step outside of passes and communication: the optimizer and a fixed overhead, without the wait for
    the slowest worker."""
    busy_s = _update_s(inputs, job)
    if layout.num_workers > 1 and job.measure_noise and job.parity == "numeric":
        # In every second step gradients are read twice more, before they are summed and after.
        state = state_bytes(job)
        busy_s *= 1 + state.gradient / _moved_bytes(state)
    return STEP_OVERHEAD_S + busy_s * neighbours_factor_of(inputs, layout)


def _update_s(inputs: PlanInputs, job: Job) -> float:
    """Seconds of the optimizer: measured, or limited by memory bandwidth."""
    if inputs.timing.update_s is not None:
        return inputs.timing.update_s
    return inputs.timing.num_parameters * _moved_bytes(state_bytes(job)) / MEMORY_RATE[inputs.cluster.device_kind]


def _moved_bytes(state: StateBytes) -> float:
    """Bytes an update moves for each parameter: parameters, gradients and state are read, all but gradients written."""
    return state.gradient + 2 * (state.parameter + state.optimizer)


def _why_no_shard_fits(inputs: PlanInputs, count: int, shard: int, num_shards: int) -> str:
    """Why not even one virtual shard fits into a device, or nothing."""
    timing, memory_bytes = inputs.timing, inputs.memory_bytes
    if memory_bytes is None:
        return ""
    needed = _replica_bytes(inputs, count, shard, num_shards)
    if needed is None:
        fitting = timing.largest_micro_batch_size or 1
        return f"a virtual shard has {shard} samples, and {fitting} are all that was seen to fit" * (fitting < shard)
    room = f"{size(needed)} of a device's {size(memory_bytes)}"
    return f"a virtual shard of {shard} samples needs {room}" * (needed > USABLE_FRACTION * memory_bytes)


def _replica_bytes(inputs: PlanInputs, count: int, micro_batch_size: int, num_passes: int) -> float | None:
    """Memory of a device with the whole model; None if activations were not measured."""
    if inputs.activations is None:
        return None
    return device_memory(
        inputs.timing.num_parameters,
        state_bytes(inputs.job),
        Mesh(dp=count),
        inputs.activations,
        micro_batch_size,
        num_micro_batches=num_passes,
    ).total_bytes


def _loader_s(inputs: PlanInputs, samples: int, neighbours: float) -> float:
    """Seconds of loading. Every worker has its own loader; workers that load between passes are slowed by the other
    workers of their node, as their passes are."""
    rate = inputs.timing.loader_samples_per_s
    if rate is None:
        return 0.0
    return samples / (rate / neighbours if inputs.timing.loads_between_passes else rate)


def _error(inputs: PlanInputs, count: int, spread: float, exposed_fraction: float) -> float:
    """Standard deviation of log(measured / forecast); every doubling beyond the cluster adds to it.

    Args:
        spread: standard deviation of the logarithm of the times of the measured passes.
    """
    unseen = max(0.0, math.log2(count / sum(inputs.node_sizes)))
    return math.hypot(_COMPUTE_ERROR, spread, _COMMUNICATION_ERROR * exposed_fraction, _UNSEEN_ERROR * unseen)


def _too_many_workers(job: Job, count: int) -> str:
    """Why this number of workers cannot share the job's batch; empty: they can."""
    if count > job.global_batch_size:
        return f"a global batch of {job.global_batch_size} has no sample for each of {count} devices"
    if count > job.virtual_shards:
        return f"it needs virtual_shards = {count}, which is part of the job"
    return ""
