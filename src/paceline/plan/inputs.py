"""The inputs of every forecast: a probed job, its cluster, and the user's request."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from paceline.errors import ClusterError, JobError
from paceline.plan.memory import (
    TransformerShape,
    measured_activations,
    smallest_device_bytes,
    state_bytes,
    transformer_layers,
)
from paceline.plan.model import Layout, Network
from paceline.plan.network_costs import PER_MESSAGE_S, between_link, inside_link
from paceline.spec import Cluster, Job, JobTiming, Mesh, check_mesh
from paceline.spec.algorithm import AlphaBeta
from paceline.spec.forecast import Grow
from paceline.spec.model_cost import Activations, Layers, ModelCost


@dataclass(frozen=True)
class ForecastRequest:
    """The user's request, besides the job and the devices."""

    grow: Grow = "none"
    efficiency_floor: float = 0.5
    price_per_device_hour: float | None = None
    currency: str = ""
    noise_scale: float | None = None
    """In samples."""
    target_samples: float | None = None
    """Samples that the job needs to reach its target with its own global batch."""
    link_bytes_per_s: float | None = None
    """Bandwidth between nodes, if not measured."""
    devices_per_node: int | None = None
    """Devices of each node beyond the cluster; None: as many as its largest node has."""


@dataclass(frozen=True)
class PlanInputs:
    """Job, cluster and request, with what follows from them for every number of devices."""

    job: Job
    cluster: Cluster
    request: ForecastRequest
    timing: JobTiming
    node_sizes: tuple[int, ...]
    """Number of devices of each existing node."""
    more_devices_per_node: int
    """Number of devices of each node beyond the cluster."""
    between: AlphaBeta | None
    activations: Activations | None
    memory_bytes: float | None
    """Memory of the smallest GPU; None: there is no GPU, or it is unknown."""
    layers: Layers
    """Layers of the model; empty: unknown."""

    def job_on(self, count: int) -> Job:
        return self.job.grown(count) if self.request.grow == "batch" else self.job

    def with_batch(self, global_batch_size: int, virtual_shards: int) -> PlanInputs:
        """The same inputs for another global batch, on any number of devices."""
        job = dataclasses.replace(self.job, global_batch_size=global_batch_size, virtual_shards=virtual_shards)
        return dataclasses.replace(self, job=job, request=dataclasses.replace(self.request, grow="none"))

    def layout(self, count: int) -> Layout:
        """The nodes that there are, the first ones first, then more of the same kind."""
        workers: list[int] = []
        left = count
        for size in self.node_sizes:
            if left:
                workers.append(min(size, left))
                left -= workers[-1]
        full, rest = divmod(left, self.more_devices_per_node)
        return Layout((*workers, *(self.more_devices_per_node,) * full, *((rest,) if rest else ())))

    def network(self, layout: Layout, label: str | None = None) -> Network:
        """The links of a layout; `label` names the kind of link inside a CPU node."""
        inside = inside_link(self.cluster.nodes[0], max(layout.workers_per_node), label)
        return Network(inside, self.between or inside, PER_MESSAGE_S[self.cluster.device_kind])


def plan_inputs(
    job: Job, cluster: Cluster, request: ForecastRequest, most_devices: int, model: ModelCost | None = None
) -> PlanInputs:
    """Everything that forecasts of up to `most_devices` devices need.

    Args:
        model: what a trace told; None: what was timed, and what the job's options tell.

    Raises:
        ClusterError: the cluster has no devices or no timing of this job, or the links between nodes are unknown.
    """
    if not cluster.nodes or not cluster.devices:
        raise ClusterError("This cluster has no devices; write one with paceline probe.")
    timing = _timing_of(job, cluster)
    sizes = tuple(len(node.devices) for node in cluster.nodes)
    between = between_link(cluster, request.link_bytes_per_s)
    if between is None and most_devices > sizes[0]:
        raise ClusterError(
            f"{most_devices} devices need several nodes, and the links between them were not measured (one node has "
            f"{sizes[0]}); probe them all, or give the rate in one direction: link_rate = 1.25e9."
        )
    measured = measured_activations(timing.micro_batches, timing.num_parameters, state_bytes(job))
    shape = transformer_shape(job)
    if model is not None:
        layers = model.layers
    else:
        layers = () if shape is None else transformer_layers(shape, timing.num_parameters)
    return PlanInputs(
        job=job,
        cluster=cluster,
        request=request,
        timing=timing,
        node_sizes=sizes,
        more_devices_per_node=request.devices_per_node or max(sizes),
        between=between,
        activations=measured if measured or model is None else model.activations,
        memory_bytes=smallest_device_bytes(cluster) or None if cluster.device_kind == "cuda" else None,
        layers=layers,
    )


def _timing_of(job: Job, cluster: Cluster) -> JobTiming:
    """The timing of this job; of several, the latest one.

    Raises:
        ClusterError: there is none, or the job has changed since in what its times follow from.
    """
    found = [timing for timing in cluster.timings if timing.job == job.name and timing.micro_batches]
    alike = [timing for timing in found if not _changed(timing, job)]
    if alike:
        return alike[-1]
    if found:
        raise ClusterError(
            f"The job '{job.name}' was timed with other settings: {', '.join(_changed(found[-1], job))}; run paceline "
            "probe with the settings of now first."
        )
    others = sorted({timing.job for timing in cluster.timings})
    known = f"it has timings of {', '.join(others)}" if others else "it has timings of no job"
    raise ClusterError(f"The cluster has no timing of the job '{job.name}' ({known}); run paceline probe JOB first.")


def _changed(timing: JobTiming, job: Job) -> list[str]:
    """The settings that the job was timed with and has other values of now, in words."""
    now = dict(one.split(" = ", 1) for one in job.timed_settings)
    timed = [one.split(" = ", 1) for one in timing.settings]
    return [f"{name} = {value}, now {now[name]}" for name, value in timed if now.get(name, value) != value]


def pass_s(timing: JobTiming, num_samples: float) -> float:
    """Seconds of one pass: straight lines between the sizes that were timed, the last one continued beyond them.

    Below the smallest size a pass takes as long as that one: it is launching kernels that takes the time. Over the only
    size that was timed all grows with the samples.
    """
    known = sorted((row.micro_batch_size, row.seconds) for row in timing.micro_batches)
    sizes, times_s = zip(*known, strict=True)
    if num_samples <= sizes[-1]:
        return float(np.interp(num_samples, sizes, times_s))
    if len(known) == 1:
        return float(times_s[0] * num_samples / sizes[0])
    slope = (times_s[-1] - times_s[-2]) / (sizes[-1] - sizes[-2])
    return float(times_s[-1] + max(0.0, slope) * (num_samples - sizes[-1]))


def spread_of_passes(timing: JobTiming, num_samples: float) -> float:
    """The spread of passes of the timed size that is nearest to `num_samples`: the standard deviation of logarithms."""
    return min(timing.micro_batches, key=lambda row: abs(row.micro_batch_size - num_samples)).spread


def transformer_shape(job: Job) -> TransformerShape | None:
    """The shape that a job's own options tell; None where they leave any of it open."""
    options = job.model.options | job.data.options
    try:
        return TransformerShape(*(int(options[name]) for name in ("num_layers", "width", "num_heads", "context")))
    except (KeyError, TypeError, ValueError):
        return None


def needs_replicas(job: Job) -> bool:
    """Whether only workers with the whole model can train it."""
    try:
        check_mesh(job, Mesh(fsdp=2))
    except JobError:
        return True
    return job.aggregation.wire == "auto-lossy"


def largest_assignment(job: Job, count: int) -> tuple[int, int, int]:
    """Samples, samples of the largest virtual shard, and virtual shards of the worker with the most to do."""
    shards = max(job.virtual_shards, min(count, job.global_batch_size))
    shard = -(-job.global_batch_size // shards)
    num_shards = -(-shards // count)
    return min(job.global_batch_size, num_shards * shard), shard, num_shards
