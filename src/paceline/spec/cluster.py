"""`Cluster`: the nodes, devices and wires a job can run on, and what was measured on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from paceline.errors import ClusterError, PacelineError
from paceline.spec.codec import JsonValue, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from paceline.spec.step_row import StepRow

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
class Peripheral:
    """A network card."""

    label: str
    """Its name in `Link.ends`: "NIC0"."""
    name: str
    """The system's name: "mlx5_0", "eth0"."""


@dataclass(frozen=True)
class Link:
    """The path between two parts of one node, the same in both directions."""

    ends: tuple[str, str]
    """Labels of both ends, devices first and in ascending order: ("GPU0", "GPU3"), ("GPU0", "NIC1")."""
    label: str
    """The label as in `nvidia-smi topo -m`: NV1 … NV18, PIX, PXB, PHB, NODE, SYS."""
    bytes_per_s: NonNegativeFloat | None = None
    """Bandwidth in one direction; None if neither a datasheet nor a measurement gives it."""
    latency_s: NonNegativeFloat | None = None
    source: Literal["datasheet", "measured"] = "datasheet"


@dataclass(frozen=True)
class Node:
    """One machine. Without GPUs its devices are CPU workers, one a core."""

    hostname: str
    num_cores: NonNegativeInt
    memory_bytes: NonNegativeInt
    cpu_name: str
    devices: tuple[Device, ...] = ()
    peripherals: tuple[Peripheral, ...] = ()
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
class JobTiming:
    """The steps of one job that were timed on this cluster, on 1, 2, … N workers."""

    job: str
    device: str
    num_parameters: NonNegativeInt
    threads_per_worker: PositiveInt
    steps: tuple[StepRow, ...] = ()
    num_samples: PositiveInt | None = None
    """Samples of the training set, that is of an epoch; None: not known."""
    settings: tuple[str, ...] = ()
    """The job's `timed_settings` when it was timed; empty: not known."""


@dataclass(frozen=True)
class ForecastCheck:
    """A forecast and the measurement of the run."""

    job: str
    devices: PositiveInt
    forecast_samples_per_s: PositiveFloat
    measured_samples_per_s: PositiveFloat

    @property
    def error(self) -> float:
        """The relative error of the forecast: 0.1 is 10 % above the measurement."""
        return self.forecast_samples_per_s / self.measured_samples_per_s - 1


@dataclass(frozen=True)
class Cluster(JsonValue):
    """Nodes, and timings of jobs on them."""

    error: ClassVar[type[PacelineError]] = ClusterError
    remedy: ClassVar[str] = "write one with paceline probe"

    nodes: tuple[Node, ...]
    timings: tuple[JobTiming, ...] = ()
    checks: tuple[ForecastCheck, ...] = ()
    """The accuracy of earlier forecasts, the latest last."""

    def checked(self, check: ForecastCheck) -> Cluster:
        """A copy with one more checked forecast; the latest 50 are kept."""
        return replace(self, checks=(*self.checks, check)[-50:])

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

    def all_reduce_s(self, size_bytes: float) -> float | None:
        """2 (n - 1) / n * size / bottleneck (Patarasuk and Yuan 2009), without latency; None without a bandwidth."""
        n = len(self.devices)
        if n == 1:
            return 0.0
        if self.bottleneck is None or not self.bottleneck.bytes_per_s:
            return None
        return 2 * (n - 1) / n * size_bytes / self.bottleneck.bytes_per_s


@dataclass(frozen=True)
class DeviceChoice:
    """The chosen devices, and for comparison the first ones by id."""

    ring: DeviceRing
    naive: DeviceRing
    """The first ones, in the order of their ids."""
    is_exact: bool
    """Whether the choice is optimal; False: only neighbouring ids were compared."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted(self.ring.devices))
