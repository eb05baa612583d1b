"""The inputs of every forecast of a job: its steps that were timed, the cluster, and the user's request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, repeat

from paceline.errors import ClusterError
from paceline.plan.memory import measured_activations, worker_memory_bytes
from paceline.plan.placement import pick
from paceline.plan.step_model import Fit, fit
from paceline.spec import AlgorithmName, Cluster, Job, Node, StepRow
from paceline.spec.algorithm import automatic_algorithm
from paceline.spec.cluster import JobTiming
from paceline.spec.forecast import Grow
from paceline.spec.model_cost import Activations, ModelCost


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
    """A datasheet's rate between nodes."""
    devices_per_node: int | None = None
    """Devices of each node beyond the cluster; None: as many as its largest node has."""


@dataclass(frozen=True)
class PlanInputs:
    """Job, cluster and request, with what follows from them for every number of devices."""

    job: Job
    cluster: Cluster
    request: ForecastRequest
    timing: JobTiming
    fit: Fit
    model: ModelCost
    is_memory_known: bool
    """Whether the activations of `model` were measured or traced."""

    @property
    def devices_per_node(self) -> int:
        """Devices of each node beyond the cluster."""
        return self.request.devices_per_node or max(len(node.devices) for node in self.cluster.nodes)

    def job_on(self, count: int) -> Job:
        return self.job.grown(count) if self.request.grow == "batch" else self.job

    def layout(self, count: int) -> tuple[int, ...]:
        """Workers on the nodes that there are, the first ones first, then on more of the same kind."""
        return workers_by_node(count, [len(node.devices) for node in self.cluster.nodes], self.devices_per_node)

    def step(self, count: int) -> StepRow:
        """The step on `count` devices, each with the whole model."""
        has_gpus = self.cluster.device_kind == "cuda"
        return job_step(self.job_on(count), self.layout(count), self.timing.num_parameters, has_gpus)

    def worker_bytes(self, count: int) -> float:
        """Memory of one of `count` workers: its device's, or on CPU its part of its node's; infinite: not known."""
        return worker_memory_bytes(self.cluster, max(self.layout(count)))


def workers_by_node(count: int, nodes: Sequence[int], further: int) -> tuple[int, ...]:
    """Workers on each node, one a device: `nodes` have so many devices, all nodes after them `further`."""
    found: list[int] = []
    for num_devices in chain(nodes, repeat(further)):
        if not (left := count - sum(found)):
            break
        found.append(min(num_devices, left))
    return tuple(found)


def job_step(job: Job, workers_per_node: Sequence[int], num_parameters: int, has_gpus: bool) -> StepRow:
    """A step of the job by workers with the whole model; the worker with the most virtual shards counts."""
    count, wire = sum(workers_per_node), job.aggregation.wire
    if wire == "auto-lossy":
        wire = "bfloat16" if len(workers_per_node) > 1 else "float32"
    algorithm: AlgorithmName = "tree_exact"  # which sends values as they are
    if job.parity == "numeric":
        algorithm = automatic_algorithm(workers_per_node, is_gloo=not has_gpus, wire=wire)
    width = 4 if wire == "float32" or algorithm == "tree_exact" else 2
    shards = max(job.virtual_shards, min(count, job.global_batch_size))
    return StepRow(
        tuple(workers_per_node),
        -(-job.global_batch_size // shards),
        -(-shards // count),
        algorithm,
        gradient_bytes=width * num_parameters or None,
        sync_every=job.aggregation.sync_every if job.aggregation.is_infrequent else 1,
    )


def plan_inputs(
    job: Job, cluster: Cluster, request: ForecastRequest, most_devices: int, model: ModelCost | None = None
) -> PlanInputs:
    """Everything that forecasts of up to `most_devices` devices need.

    Args:
        model: what a trace told; None: what was timed, and what the job's options tell.

    Raises:
        ClusterError: the cluster has no devices or no timing of this job, or nothing is known of links between nodes.
    """
    if not cluster.devices:
        raise ClusterError("This cluster has no devices; write one with paceline probe.")
    timing = _timing_of(job, cluster)
    first, rate = len(cluster.nodes[0].devices), request.link_bytes_per_s
    if rate is None and most_devices > first and all(row.num_nodes == 1 for row in timing.steps):
        raise ClusterError(
            f"{most_devices} devices need several nodes, and no step was timed on several (a node has {first}); probe "
            "them, or give the rate of the links between them in one direction: link_rate = 1.25e9."
        )
    steps = tuple(dataclasses.replace(row, link_bytes_per_s=rate) for row in timing.steps)
    inside = None if any(row.most_on_node > 1 for row in steps) else _inside_bytes_per_s(cluster.nodes[0])
    costs = model or ModelCost(timing.num_parameters, Activations(0.0))
    measured = measured_activations(job, timing)
    return PlanInputs(
        job,
        cluster,
        request,
        timing,
        fit=_fit_once(steps, inside),
        model=dataclasses.replace(costs, activations=measured or costs.activations),
        is_memory_known=bool(measured or model),
    )


_fit_once = lru_cache(maxsize=8)(fit)


def _inside_bytes_per_s(node: Node) -> float | None:
    """The rate of the slowest link in the best ring of all GPUs of a node; None: not known, or it has CPU workers."""
    if node.device_kind != "cuda" or len(node.devices) < 2:
        return None
    slowest = pick(node, len(node.devices)).ring.bottleneck
    return slowest.bytes_per_s if slowest else None


def _timing_of(job: Job, cluster: Cluster) -> JobTiming:
    """The timing of this job; of several, the latest one.

    Raises:
        ClusterError: there is none, or the job has changed since in what its times follow from.
    """
    now = dict(one.split(" = ", 1) for one in job.timed_settings)
    found, changed = None, []
    for timing in cluster.timings:
        if timing.job == job.name and timing.steps:
            timed = [one.split(" = ", 1) for one in timing.settings]
            changed = [f"{name} = {value}, now {now[name]}" for name, value in timed if now.get(name, value) != value]
            found = found if changed else timing
    if found is not None:
        return found
    if changed:
        raise ClusterError(
            f"The job '{job.name}' was timed with other settings: {', '.join(changed)}; run paceline probe with the "
            "settings of now first."
        )
    others = ", ".join(sorted({timing.job for timing in cluster.timings if timing.steps})) or "no job"
    raise ClusterError(
        f"The cluster has no timed steps of the job '{job.name}' (it has timings of {others}); run paceline probe JOB "
        "first."
    )
