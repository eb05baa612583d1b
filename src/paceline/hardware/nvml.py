"""The NVIDIA driver's library NVML, and what it knows of GPUs and the links between them.

Every question is asked alone: a driver, a virtual GPU or MIG mode that cannot answer one still answers the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.spec import Device
from paceline.spec.run_status import GpuUse

BUSY_PERCENT = 10
"""Utilisation from which a GPU counts as in use; a desktop stays below."""
BUSY_BYTES = 2**30
"""Memory in use from which it does; the driver alone takes less."""

ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""Labels by nvmlGpuTopologyLevel_t; 0 are two GPUs on one board, which share its switch."""

SWITCH_TYPE = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH."""
SWITCHES = "switches"


class DriverProblem(Exception):  # noqa: N818 - it says what happened
    """The driver, or its library, is missing or does not answer; says why."""


class Nvml:
    """The library, open."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def ask(self, question: str, *arguments: Any) -> Any:
        """The answer, or None where this library, driver or GPU has none."""
        try:
            return getattr(self.library, question)(*arguments)
        except (self.library.NVMLError, AttributeError):
            return None

    def demand(self, question: str, *arguments: Any) -> Any:
        """The answer. Raises `DriverProblem` where there is none."""
        try:
            return getattr(self.library, question)(*arguments)
        except self.library.NVMLError as problem:
            raise DriverProblem(str(problem)) from None

    def text(self, question: str, *arguments: Any) -> str:
        """The answer as text, empty where there is none."""
        return _string(self.ask(question, *arguments))


@contextmanager
def open_nvml(library: Any = None) -> Iterator[Nvml]:
    """NVML for the time of a `with`.

    Args:
        library: what answers in place of the module pynvml.

    Raises:
        DriverProblem: no module or no driver.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            raise DriverProblem("nvidia-ml-py is not installed") from None
    nvml = Nvml(library)
    nvml.demand("nvmlInit")
    try:
        yield nvml
    finally:
        nvml.ask("nvmlShutdown")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this node, by PCI bus."""

    devices: tuple[Device, ...] = ()
    labels: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """The label of each pair of indices in ascending order, as far as the driver tells."""
    notes: tuple[str, ...] = ()


def read_gpus(library: Any = None) -> Gpus:
    """The GPUs that NVML finds; none without the library or the driver."""
    try:
        with open_nvml(library) as nvml:
            return _read(nvml)
    except DriverProblem:
        return Gpus()


def gpu_use(library: Any = None) -> dict[int, GpuUse]:
    """What each program uses of this node's GPUs, by process id; empty without the library or the driver."""
    try:
        with open_nvml(library) as nvml:
            found = {}
            for index in range(nvml.ask("nvmlDeviceGetCount") or 0):
                handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
                rates = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
                for process in nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle) or ():
                    found[process.pid] = GpuUse(index, process.usedGpuMemory, rates and rates.gpu / 100)
            return found
    except DriverProblem:
        return {}


def busy(utilization_percent: int | None, used_bytes: int | None) -> str:
    """How a GPU is in use: "62 % busy, 31.0 GiB in use"; empty if it is free or unknown."""
    if (utilization_percent or 0) < BUSY_PERCENT and (used_bytes or 0) < BUSY_BYTES:
        return ""
    reasons = [] if utilization_percent is None else [f"{utilization_percent} % busy"]
    if used_bytes is not None:
        reasons.append(f"{used_bytes / 2**30:.1f} GiB in use")
    return ", ".join(reasons)


def short_bus_id(text: str) -> str:
    """ "00000000:3B:00.0" as sysfs writes it, "0000:3b:00.0"."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:] if domain.startswith('0000') else domain}:{rest}" if rest else text.strip().lower()


def _read(nvml: Nvml) -> Gpus:
    num_gpus = nvml.ask("nvmlDeviceGetCount") or 0
    handles = {i: handle for i in range(num_gpus) if (handle := nvml.ask("nvmlDeviceGetHandleByIndex", i))}
    devices = tuple(_device(nvml, index, handle) for index, handle in handles.items())
    notes = [
        f"GPU{index} could not be opened; nvidia-smi says why." for index in range(num_gpus) if index not in handles
    ]
    notes += [
        f"GPU{index} is in MIG mode: its slices have no links to other GPUs."
        for index, handle in handles.items()
        if (mode := nvml.ask("nvmlDeviceGetMigMode", handle)) and mode[0] == 1
    ]
    return Gpus(devices, _labels(nvml, handles, devices), tuple(notes))


def _device(nvml: Nvml, index: int, handle: Any) -> Device:
    pci = nvml.ask("nvmlDeviceGetPciInfo", handle)
    # Version 2 leaves out what the driver keeps for itself.
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle, getattr(nvml.library, "nvmlMemory_v2", None))
    memory = memory or nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    rates = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
    return Device(
        "cuda",
        index,
        nvml.text("nvmlDeviceGetName", handle),
        memory.total if memory else 0,
        nvml.text("nvmlDeviceGetUUID", handle),
        short_bus_id(_string(pci.busId)) if pci else "",
        busy=busy(rates.gpu if rates else None, memory.used if memory else None),
    )


def _labels(nvml: Nvml, handles: Mapping[int, Any], devices: tuple[Device, ...]) -> dict[tuple[int, int], str]:
    links = {index: _num_links(nvml, handle) for index, handle in handles.items()}
    bus_ids = {device.index: device.pci_bus_id for device in devices}
    labels: dict[tuple[int, int], str] = {}
    for one in handles:
        for other in (index for index in handles if index > one):
            # Switches join all GPUs that have links to them.
            num_links = links[one].get(bus_ids[other], 0) or min(links[end].get(SWITCHES, 0) for end in (one, other))
            level = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other])
            if num_links:
                labels[one, other] = f"NV{num_links}"
            elif level in ANCESTORS:
                labels[one, other] = ANCESTORS[level]
    return labels


def _num_links(nvml: Nvml, handle: Any) -> dict[str, int]:
    """Active NVLinks by the bus id of their other end; those to any switch together.

    An end that the driver cannot name is a switch that a virtual machine does not show.
    """
    links: dict[str, int] = {}
    for number in range(getattr(nvml.library, "NVML_NVLINK_MAX_LINKS", 18)):
        if nvml.ask("nvmlDeviceGetNvLinkState", handle, number) != 1:
            continue
        kind = nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
        remote = nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
        target = SWITCHES if kind == SWITCH_TYPE or not remote else short_bus_id(_string(remote.busId))
        links[target] = links.get(target, 0) + 1
    return links


def _string(value: Any) -> str:
    """Older releases of the library give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
