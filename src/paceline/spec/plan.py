"""`Plan`: how one job is spread over devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.spec.algorithm import AlgorithmName
from paceline.spec.cluster import DeviceKind
from paceline.spec.codec import Bounds, JsonValue, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from paceline.spec.job import WorkerCount
from paceline.spec.mesh import Mesh, ScheduleName

PLAN_FILE, LIMIT_FILE = "plan.json", "limit.json"
"""The plan, and when the run ends, in a run folder."""


@dataclass(frozen=True)
class NodePlacement:
    """The workers of one node."""

    hostname: str = ""
    """The node's address for the launcher; empty: this node."""
    num_workers: PositiveInt = 1
    devices: tuple[NonNegativeInt, ...] = ()
    """GPUs in the order of the local ranks, by PCI bus; empty: as in the caller's CUDA_VISIBLE_DEVICES."""
    cpus: tuple[tuple[NonNegativeInt, ...], ...] = ()
    """The cores each worker is pinned to; empty: the operating system decides."""


@dataclass(frozen=True)
class PipelineSpec:
    """How the stages of a pipeline are cut and take turns."""

    schedule: ScheduleName = "1f1b"
    """The order of forward and backward passes, as in `torch.distributed.pipelining`."""
    stages_per_worker: PositiveInt = 1
    """More than one with the schedules "interleaved" and "zero_bubble"."""
    cuts: tuple[str, ...] = ()
    """The blocks that begin a stage, all but the first's; empty: stages that compute equally much."""


@dataclass(frozen=True)
class Plan(JsonValue):
    """World size, devices and how gradients are aggregated; nothing in it changes what a run learns."""

    world_size: WorkerCount = 1
    device_kind: DeviceKind = "cpu"
    nodes: tuple[NodePlacement, ...] = ()
    """The nodes in the order of their ranks; empty: all workers on this node."""
    threads_per_worker: PositiveInt = 1
    """CPU threads a worker computes with: an equal share of the node's cores if nothing else is asked for."""
    algorithm: AlgorithmName = "auto"
    """How gradients are summed over workers; "auto": torch's own sum, and "hierarchical" between
    nodes of several workers that compute on CPUs."""
    num_servers: PositiveInt = 1
    """Workers that also serve, with parameter servers."""
    mesh: Mesh | None = None
    """The axes the workers are laid out on; None: data parallelism over all of them."""
    pipeline: PipelineSpec = PipelineSpec()
    recompute: bool = False
    """Activation checkpointing: backward computes a block's activations again instead of keeping them."""
    tensor_plan: dict[str, str] | None = None
    """How the axis tp shards modules, such as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}; None: the
    model's own tensor plan, its attribute `_tp_plan`."""
    cpu_offload: bool = False
    """Keep sharded parameters and optimizer state in CPU memory while they are not in use."""
    devices_in_process: PositiveInt = 1
    """Devices that one worker drives by itself (the strategy dp_one_process)."""
    debug_comm: bool = False
    """Compare every collective across workers before it runs, not only those of the first steps."""
    timeout_s: Annotated[float, Bounds(low=1)] = 600.0
    """How long a collective waits for a silent peer."""

    forecast_samples_per_s: NonNegativeFloat | None = None
    """The planner's forecast of this run; None: there is none."""

    @property
    def backend(self) -> str:
        return "nccl" if self.device_kind == "cuda" else "gloo"

    @property
    def placements(self) -> tuple[NodePlacement, ...]:
        """The nodes of the run, one at least; their workers add up to the world size."""
        return self.nodes or (NodePlacement(num_workers=self.world_size),)


@dataclass(frozen=True)
class RunLimit(JsonValue):
    """Where a run ends before its epochs do."""

    max_steps: PositiveInt | None = None
    """The number of optimizer updates; None: it does not."""
    max_minutes: PositiveFloat | None = None
    """Minutes since the launch; None: it does not."""
