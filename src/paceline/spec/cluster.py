"""`Cluster`: the nodes, devices and wires a job can run on, and what was measured on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from paceline.errors import ClusterError, JobError, file_problems
from paceline.regular_files import replace_text
from paceline.spec.codec import ABOVE_ZERO, ANY, NOT_NEGATIVE, POSITIVE, JsonValue, at_least, between
from paceline.spec.step_row import StepRow

DeviceKind = Literal["cpu", "cuda"]
Source = Literal["datasheet", "measured"]

_LONGEST_S = 1e6
"""Seconds that no message takes."""
SCHEMA = 1
"""The version of cluster.json; files of other versions are refused."""


@dataclass(frozen=True)
class Device:
    """One device that can hold one worker."""

    kind: DeviceKind
    index: int = field(metadata=NOT_NEGATIVE)
    """The number of the device in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    name: str
    memory_bytes: int = field(metadata=NOT_NEGATIVE)
    uuid: str = ""
    pci_bus_id: str = ""
    """The PCI address as in sysfs: "0000:3b:00.0"."""
    numa_node: int | None = None
    cpus: tuple[int, ...] = at_least(0, ())
    """The cores nearest to the device; empty if unknown."""
    busy: str = ""
    """How the device is in use, such as "62 % busy, 31 GiB in use"; empty if it is free."""

    @property
    def label(self) -> str:
        """Its name in `Link.ends`: "GPU3"."""
        return f"{'GPU' if self.kind == 'cuda' else 'CPU'}{self.index}"


@dataclass(frozen=True)
class Peripheral:
    """A network card or a disk, with its location relative to devices."""

    kind: Literal["nic", "disk"]
    label: str
    """Its name in `Link.ends`: "NIC0", "DISK1"."""
    name: str
    """The system's name: "mlx5_0", "eth0", "nvme0n1"."""
    pci_bus_id: str = ""
    numa_node: int | None = None
    bytes_per_s: float | None = at_least(0, None)


@dataclass(frozen=True)
class Link:
    """The path between two parts of one node, the same in both directions."""

    ends: tuple[str, str]
    """Labels of both ends, devices first and in ascending order: ("GPU0", "GPU3"), ("GPU0", "NIC1")."""
    label: str
    """The label as in `nvidia-smi topo -m`: NV1 … NV18, PIX, PXB, PHB, NODE, SYS."""
    bytes_per_s: float | None = at_least(0, None)
    """Bandwidth in one direction; None if neither a datasheet nor a measurement gives it."""
    latency_s: float | None = between(0, _LONGEST_S, None)
    source: Source = "datasheet"


@dataclass(frozen=True)
class Node:
    """One machine. Without GPUs its devices are CPU workers, one a core."""

    hostname: str
    num_cores: int = field(metadata=NOT_NEGATIVE)
    memory_bytes: int = field(metadata=NOT_NEGATIVE)
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


_FORMER_TIMINGS = (
    *("micro_batches", "largest_micro_batch_size", "loader_samples_per_s", "checkpoint_bytes_per_s"),
    *("loads_between_passes", "update_s", "workers_together", "workers_together_on_node", "load", "sums"),
    *("together_micro_batch_size", "together_slowdown", "sharding"),
)
"""What earlier versions timed, part by part."""
_PROBE_AGAIN = (ANY, "run paceline probe again, which times whole steps.")


@dataclass(frozen=True)
class JobTiming:
    """The steps of one job that were timed on this cluster, on 1, 2, … N workers."""

    FORMER_KEYS: ClassVar[Mapping[str, tuple[Any, str]]] = dict.fromkeys(_FORMER_TIMINGS, _PROBE_AGAIN)

    job: str
    device: str
    num_parameters: int = field(metadata=NOT_NEGATIVE)
    threads_per_worker: int = field(metadata=POSITIVE)
    steps: tuple[StepRow, ...] = ()
    num_samples: int | None = at_least(1, None)
    """Samples of the training set, that is of an epoch; None: not known."""
    settings: tuple[str, ...] = ()
    """The job's `timed_settings` when it was timed; empty: not known."""


@dataclass(frozen=True)
class ForecastCheck:
    """A forecast and the measurement of the run."""

    job: str
    devices: int = field(metadata=POSITIVE)
    forecast_samples_per_s: float = field(metadata=ABOVE_ZERO)
    measured_samples_per_s: float = field(metadata=ABOVE_ZERO)

    @property
    def error(self) -> float:
        """The relative error of the forecast: 0.1 is 10 % above the measurement."""
        return self.forecast_samples_per_s / self.measured_samples_per_s - 1


MOST_CHECKS = 50
"""The number of forecast checks that are kept."""


@dataclass(frozen=True)
class Cluster(JsonValue):
    """Nodes, and timings of jobs on them."""

    FORMER_KEYS: ClassVar[Mapping[str, tuple[Any, str]]] = {"network": _PROBE_AGAIN}

    nodes: tuple[Node, ...]
    timings: tuple[JobTiming, ...] = ()
    checks: tuple[ForecastCheck, ...] = ()
    """The accuracy of earlier forecasts, the latest last."""

    def checked(self, check: ForecastCheck) -> Cluster:
        """A copy with one more checked forecast."""
        return replace(self, checks=(*self.checks, check)[-MOST_CHECKS:])

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of all nodes, in the order of the nodes."""
        return tuple(device for node in self.nodes for device in node.devices)

    @property
    def device_kind(self) -> DeviceKind:
        """The device kind of all nodes; "cuda" only if every node has GPUs."""
        return "cuda" if all(node.device_kind == "cuda" for node in self.nodes) else "cpu"

    def save(self, path: Path, mode: int = 0o666) -> None:
        """Write cluster.json, complete or not at all."""
        replace_text(path, json.dumps({"schema": SCHEMA, **self.to_mapping()}, indent=1) + "\n", mode)

    @classmethod
    def load(cls, path: Path) -> Cluster:
        """Read cluster.json.

        Raises:
            ClusterError: no such file, not JSON, of another version, or unknown keys and invalid values.
        """
        with file_problems(f"{path} cannot be read as a cluster", ClusterError):
            text = path.read_text("utf-8")
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, source: str) -> Cluster:
        """Parse the content of cluster.json; `source` names it in a `ClusterError`."""
        try:
            mapping = json.loads(text)
        except ValueError as problem:
            raise ClusterError(f"{source} cannot be read as a cluster: not JSON ({problem}).") from None
        if not isinstance(mapping, dict) or mapping.pop("schema", None) != SCHEMA:
            raise ClusterError(f"{source} is not a cluster file of version {SCHEMA}; write one with paceline probe.")
        try:
            return cls.from_mapping(mapping)
        except JobError as problem:
            raise ClusterError(f"{source} cannot be read as a cluster: {problem}") from None
