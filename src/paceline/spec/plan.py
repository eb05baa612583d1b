"""`Plan`: how one job is spread over devices; `Mesh`: the degree of every axis of parallelism, and its name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from paceline.errors import JobError, did_you_mean, shown
from paceline.spec.algorithm import AlgorithmName
from paceline.spec.cluster import DeviceKind
from paceline.spec.codec import Bounds, JsonValue, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from paceline.spec.job import Job, WorkerCount

PLAN_FILE, LIMIT_FILE = "plan.json", "limit.json"
"""The plan, and when the run ends, in a run folder."""

AxisName = Literal["pp", "dp", "fsdp", "tp"]
AXES: tuple[AxisName, ...] = ("pp", "dp", "fsdp", "tp")
"""The order in which ranks are laid out: neighbours in the last axis are neighbours in rank, so the axis that sends
most gets the fastest links (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 3.2)."""

STRATEGIES = ("dp", "fsdp", "zero1", "zero2", "hsdp", "pp", "tp", "dp_one_process")
"""The strategies with a name; others are meshes such as "dp2 x pp2"."""
_TERM = re.compile(rf"({'|'.join(AXES)}|zero[123]):?([0-9]{{0,7}})")

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


@dataclass(frozen=True)
class Mesh:
    """The degree of every axis; their product is the world size."""

    dp: PositiveInt = 1
    """Groups that each hold everything below once: they share the batch and sum their gradients."""
    fsdp: PositiveInt = 1
    """Workers that share the batch and each hold a shard of every parameter, gradient and optimizer state."""
    tp: PositiveInt = 1
    """Workers that each compute a slice of every layer."""
    pp: PositiveInt = 1
    """Pipeline stages, which each hold some layers and send activations to the next stage."""
    zero_stage: Annotated[int, Bounds(low=1, high=3)] = 3
    """What the fsdp axis shards: 1: optimizer state; 2: gradients too; 3: parameters too."""

    @property
    def num_workers(self) -> int:
        return math.prod(map(self.degree, AXES))

    @property
    def num_assignments(self) -> int:
        """The number of parts into which a global batch is divided: groups of workers that compute the same samples."""
        return self.dp * self.fsdp

    def degree(self, axis: AxisName) -> int:
        return int(getattr(self, axis))

    def place(self, rank: int) -> dict[AxisName, int]:
        """The coordinates of a rank on all axes."""
        found: dict[AxisName, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.degree(axis))
        return found

    def assignment_index(self, rank: int) -> int:
        """The index of a rank's assignment of virtual shards."""
        place = self.place(rank)
        return place["dp"] * self.fsdp + place["fsdp"]

    def leads_assignment(self, rank: int) -> bool:
        """Whether a rank is the first of the ranks with the same samples."""
        place = self.place(rank)
        return place["pp"] == place["tp"] == 0

    @property
    def is_plain(self) -> bool:
        """Whether every worker holds a whole replica."""
        return self.num_workers == self.dp

    def __str__(self) -> str:
        data = "fsdp" if self.zero_stage == 3 else f"zero{self.zero_stage}:"
        named = (("dp", self.dp), (data, self.fsdp), ("tp", self.tp), ("pp", self.pp))
        return " x ".join(f"{axis}{degree}" for axis, degree in named if degree > 1) or "one device"


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

    world_size: WorkerCount = field(default=1, metadata={"in_every_file": True})
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


def parse_mesh(text: str, num_workers: int | None = None, num_nodes: int = 1) -> Mesh:
    """The mesh of a strategy: "fsdp", "hsdp", "dp2 x pp2", "fsdp x tp2".

    One axis may leave its degree out: it takes the workers that are left, where `num_workers` says how many there are.
    "hsdp" replicates over the nodes and shards inside of each; on one node it makes two replicas. Raises `JobError`
    where there is no such strategy, an axis is named twice, or the degrees do not make up the world size.
    """
    words, named = text.strip().lower(), f"The strategy {shown(text)}"
    if words == "hsdp":
        words = f"dp{max(num_nodes, 2)} x fsdp"
    degrees: dict[str, int | None] = {}
    zero_stage = 3
    for word in re.split(r"\s*[x*,]\s*|\s+", words):
        term = _TERM.fullmatch(word)
        if term is None:
            raise JobError(
                f"There is no strategy {shown(text)} here; {did_you_mean(word, STRATEGIES)}it is one of "
                f"{', '.join(STRATEGIES)}, or axes with their degrees such as 'dp2 x pp2' or 'fsdp2 x tp2'; "
                "dp_one_process and auto are for paceline train and paceline scale alone."
            )
        axis, degree = term.groups()
        if axis.startswith("zero"):
            axis, zero_stage = "fsdp", int(axis[-1])
        if axis in degrees or (not degree and None in degrees.values()):
            raise JobError(f"{named} should name every axis once, and leave at most one degree out.")
        degrees[axis] = int(degree) if degree else None
    known = math.prod(degree for degree in degrees.values() if degree is not None)
    num_workers = known if num_workers is None else num_workers
    found = {axis: num_workers // max(known, 1) if degree is None else degree for axis, degree in degrees.items()}
    if num_workers < 1 or math.prod(found.values()) != num_workers:
        raise JobError(
            f"{named} does not make {num_workers} workers; the degrees of its axes should multiply to {num_workers}."
        )
    return Mesh(zero_stage=zero_stage, **found)


def check_mesh(job: Job, mesh: Mesh) -> None:
    """Raises `JobError` for a job of too few virtual shards, or that only whole replicas can train, on other meshes."""
    if mesh.num_assignments > job.virtual_shards:
        raise JobError(
            f"{mesh.num_assignments} workers cannot share virtual_shards = {job.virtual_shards}; use at most so many, "
            "or more virtual shards (they are part of the job: as many for every number of workers)."
        )
    method, is_bitwise = job.aggregation.method, job.parity == "bitwise"
    for is_wrong, setting, remedy in (
        (method != "every_step", f"aggregation.method = '{method}'", "aggregation.method = 'every_step'"),
        (job.precision == "float16", "precision = 'float16'", "precision = 'bfloat16'"),
        # Divided layers make their sums in another order.
        (is_bitwise and mesh.tp > 1, "parity = 'bitwise'", "parity = 'numeric', or an axis fsdp or pp in place of tp"),
        # Shards have the plain format, whose kernels may round differently.
        (is_bitwise and job.channels_last, "channels_last with parity = 'bitwise'", "channels_last = false"),
    ):
        if is_wrong and not mesh.is_plain:
            raise JobError(
                f"{setting} needs the whole model on every worker, not {mesh}; use {remedy}, or the strategy dp."
            )
