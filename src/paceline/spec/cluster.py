"""`Cluster`: the nodes, devices and wires a job can run on, and what was measured on them, as rows of `StepRow`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

from paceline.errors import ClusterError, PacelineError
from paceline.spec.algorithm import AlgorithmName
from paceline.spec.codec import JsonValue, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Device:
    """One device that can hold one worker."""

    kind: DeviceKind
    index: NonNegativeInt
    """The number of the device in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    name: str
    memory_bytes: NonNegativeInt
    uuid: str = ""
    pci_bus_id: str = ""
    """The PCI address as in sysfs: "0000:3b:00.0"."""
    numa_node: int | None = None
    cpus: tuple[NonNegativeInt, ...] = ()
    """The cores nearest to the device; empty if unknown."""
    busy: str = ""
    """How the device is in use, such as "62 % busy, 31 GiB in use"; empty if it is free."""

    @property
    def label(self) -> str:
        """Its name in `Link.ends`: "GPU3"."""
        return f"{'GPU' if self.kind == 'cuda' else 'CPU'}{self.index}"


@dataclass(frozen=True)
class Link:
    """The path between two parts of one node, the same in both directions."""

    ends: tuple[str, str]
    """Labels of both ends, devices first and in ascending order: ("GPU0", "GPU3"), ("GPU0", "NIC1")."""
    label: str
    """The label as in `nvidia-smi topo -m`: NV1 … NV18, PIX, PXB, PHB, NODE, SYS."""
    bytes_per_s: NonNegativeFloat | None = None
    """Bandwidth in one direction, by a datasheet; None: not known."""


def num_nvlinks(label: str) -> int:
    """The number in a link's label NV1 … NV18; 0 for every other label."""
    bonds = label.removeprefix("NV")
    return int(bonds) if bonds != label and bonds.isdecimal() else 0


@dataclass(frozen=True)
class Node:
    """One machine. Without GPUs its devices are CPU workers, one a core."""

    hostname: str
    num_cores: NonNegativeInt
    memory_bytes: NonNegativeInt
    cpu_name: str
    devices: tuple[Device, ...] = ()
    nics: dict[str, str] = field(default_factory=dict)
    """Network cards: the label of each in `Link.ends`, "NIC0", and the system's name, "mlx5_0" or "eth0"."""
    links: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()
    """What was left out or could not be read, one sentence each."""
    is_remote: bool = False
    """Whether a launcher starts the node's workers; `hostname` is then its address for the launcher."""

    @property
    def device_kind(self) -> DeviceKind:
        return self.devices[0].kind if self.devices else "cpu"

    def link(self, one: str, other: str) -> Link | None:
        """The link between two labels, in either order; None if unknown."""
        return next((link for link in self.links if link.ends in ((one, other), (other, one))), None)

    def with_cpu_workers(self, count: int) -> Node:
        """The node with so many CPU workers, which may outnumber its cores and share its memory."""
        devices = tuple(Device("cpu", i, self.cpu_name, self.memory_bytes // count) for i in range(count))
        return replace(self, devices=devices)


@dataclass(frozen=True)
class StepRow:
    """One step. The rows that `probe` writes, rows of a file, and the steps that a forecast is asked for are alike."""

    workers_per_node: tuple[PositiveInt, ...]
    micro_batch_size: PositiveInt
    """Samples of one pass of one worker."""
    num_passes: PositiveInt = 1
    """Passes of a worker in a step, which accumulate gradients and then sum them once."""
    algorithm: AlgorithmName = "all_reduce"
    gradient_bytes: PositiveFloat | None = None
    """Bytes of gradients that a worker sums in a step; None: as in the other rows."""
    link_bytes_per_s: PositiveFloat | None = None
    """A datasheet's rate of a node's link to the others, which is a bound; None: as in the other rows."""
    sync_every: PositiveInt = 1
    """Steps between two sums."""
    step_time_s: PositiveFloat | None = None
    """None: it was not measured."""
    sync_time_s: NonNegativeFloat | None = None
    """How long a worker waited for gradients; None: not measured."""
    loading_s: NonNegativeFloat | None = None
    """How long a worker waited for its samples; None: not measured."""
    spread: NonNegativeFloat = 0.0
    """Standard deviation of the logarithm of the step's time; 0: not known."""
    peak_memory_bytes: NonNegativeInt | None = None
    """The most that tensors of one worker held of its GPU; None: not measured."""

    def unmeasured(self) -> StepRow:
        """The same step without what was measured of it."""
        return replace(self, step_time_s=None, sync_time_s=None, loading_s=None, spread=0.0, peak_memory_bytes=None)

    @property
    def num_nodes(self) -> int:
        return len(self.workers_per_node)

    @cached_property
    def num_workers(self) -> int:
        return sum(self.workers_per_node)

    @cached_property
    def most_on_node(self) -> int:
        return max(self.workers_per_node)

    @property
    def samples_per_worker(self) -> int:
        """Samples that one worker computes in a step."""
        return self.micro_batch_size * self.num_passes

    @property
    def global_batch_size(self) -> int:
        return self.samples_per_worker * self.num_workers

    @property
    def layout_name(self) -> str:
        """ "16 x 4" for 16 equal nodes of 4, else "2+4"."""
        counts = set(self.workers_per_node)
        return f"{self.num_nodes} x {counts.pop()}" if len(counts) == 1 else "+".join(map(str, self.workers_per_node))


@dataclass(frozen=True)
class JobTiming:
    """The steps of one job that were timed on this cluster, on 1, 2, … N workers."""

    job: str
    device: str
    num_parameters: NonNegativeInt
    threads_per_worker: PositiveInt
    steps: tuple[StepRow, ...] = ()
    num_samples: PositiveInt | None = None
    """Samples of the training set, that is of an epoch; None: not known."""
    settings: dict[str, str] = field(default_factory=dict)
    """The job's `timed_settings` when it was timed; empty: not known."""


@dataclass(frozen=True)
class Cluster(JsonValue):
    """Nodes, and timings of jobs on them."""

    error: ClassVar[type[PacelineError]] = ClusterError
    remedy: ClassVar[str] = "write one with paceline probe"

    nodes: tuple[Node, ...]
    timings: tuple[JobTiming, ...] = ()
    forecast_errors: tuple[float, ...] = ()
    """Relative errors of earlier forecasts, the latest last: 0.1 is 10 % above the measurement."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of all nodes, in the order of the nodes."""
        return tuple(device for node in self.nodes for device in node.devices)

    @property
    def device_kind(self) -> DeviceKind:
        """The device kind of all nodes; "cuda" only if every node has GPUs."""
        return "cuda" if all(node.device_kind == "cuda" for node in self.nodes) else "cpu"


@dataclass(frozen=True)
class DeviceRing:
    """Devices in the order in which they pass data on; the last passes it to the first."""

    devices: tuple[int, ...]
    bottleneck: Link | None
    """The slowest link; None for one device, and if a link is unknown."""


@dataclass(frozen=True)
class DeviceChoice:
    """The chosen devices, and for comparison the first ones by id."""

    ring: DeviceRing
    naive: DeviceRing
    """The first ones, in the order of their ids."""
    is_exact: bool
    """Whether the choice is optimal; False: only neighbouring ids were compared."""
