"""The NVIDIA driver's library NVML, and what it knows of GPUs and the links between them.

Every question is asked alone: a driver, a virtual GPU or MIG mode that cannot answer one still answers the others.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any

from paceline.spec import Device
from paceline.spec.record import GpuUse

BUSY_PERCENT = 10
"""Utilisation from which a GPU counts as in use; a desktop stays below."""
BUSY_BYTES = 2**30
"""Memory in use from which it does; the driver alone takes less."""

ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""Labels by nvmlGpuTopologyLevel_t; 0 are two GPUs on one board, which share its switch."""
THROTTLING = {
    0x08: "the hardware slows it down",
    0x20: "it is too hot",
    0x40: "it is so hot that the hardware slows it down",
    0x80: "the power supply slows it down",
}
"""The bits of nvmlClocksThrottleReasons* (nvml.h) that mean trouble. A power cap under load is no trouble."""
SWITCH_TYPE = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH."""
SWITCHES = "switches"
_MOST_NUMA_NODES = 1024


class Nvml:
    """The library, open; without the module or a driver it has no answers."""

    def __init__(self, library: Any, problem: str) -> None:
        self.library = library
        self.problem = problem
        """Why it has no answers; empty: it has some."""

    def ask(self, question: str, *arguments: Any) -> Any:
        """The answer, or None where this library, driver or GPU has none."""
        if self.problem:
            return None
        try:
            return getattr(self.library, question)(*arguments)
        except (self.library.NVMLError, AttributeError):
            return None

    def text(self, question: str, *arguments: Any) -> str:
        """The answer as text, empty where there is none."""
        return str(self.ask(question, *arguments) or "")

    def handles(self) -> dict[int, Any]:
        """The GPUs that can be opened, by index."""
        indices = range(self.ask("nvmlDeviceGetCount") or 0)
        return {index: gpu for index in indices if (gpu := self.ask("nvmlDeviceGetHandleByIndex", index))}


@contextmanager
def open_nvml(library: Any = None) -> Iterator[Nvml]:
    """NVML for the time of a `with`. `library`: what answers in place of the module pynvml."""
    problem = ""
    try:
        library = library or importlib.import_module("pynvml")
        library.nvmlInit()
    except ImportError:
        problem = "nvidia-ml-py is not installed"
    except library.NVMLError as reason:
        problem = str(reason)
    nvml = Nvml(library, problem)
    try:
        yield nvml
    finally:
        nvml.ask("nvmlShutdown")


def read_gpus(library: Any = None) -> tuple[tuple[Device, ...], dict[tuple[str, str], str]]:
    """The GPUs that NVML finds, by PCI bus, none without the library or the driver; and the label of the link between
    each pair of `Device.label`, as far as the driver tells."""
    with open_nvml(library) as nvml:
        handles = nvml.handles()
        devices = tuple(_device(nvml, index, handle) for index, handle in handles.items())
        return devices, _labels(nvml, handles, devices)


def gpu_use(library: Any = None) -> dict[int, GpuUse]:
    """What each program uses of this node's GPUs, by process id; empty without the library or the driver."""
    found = {}
    with open_nvml(library) as nvml:
        for index, handle in nvml.handles().items():
            rates = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
            for process in nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle) or ():
                found[process.pid] = GpuUse(index, process.usedGpuMemory, rates and rates.gpu / 100)
    return found


def throttling(nvml: Nvml, handle: Any) -> list[str]:
    reasons = nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    return [words for bit, words in THROTTLING.items() if reasons & bit]


def busy(nvml: Nvml, handle: Any) -> str:
    """How a GPU is in use: "62 % busy, 31.0 GiB in use"; empty if it is free or unknown."""
    rates, memory = nvml.ask("nvmlDeviceGetUtilizationRates", handle), _memory(nvml, handle)
    if (rates.gpu if rates else 0) < BUSY_PERCENT and (memory.used if memory else 0) < BUSY_BYTES:
        return ""
    reasons = [f"{rates.gpu} % busy"] if rates else []
    return ", ".join([*reasons, f"{memory.used / 2**30:.1f} GiB in use"] if memory else reasons)


def _memory(nvml: Nvml, handle: Any) -> Any:
    # Version 2 leaves out what the driver keeps for itself.
    version = getattr(nvml.library, "nvmlMemory_v2", None)
    return nvml.ask("nvmlDeviceGetMemoryInfo", handle, version) or nvml.ask("nvmlDeviceGetMemoryInfo", handle)


def _device(nvml: Nvml, index: int, handle: Any) -> Device:
    memory = _memory(nvml, handle)
    num_words = -(-(os.cpu_count() or 1) // 64)
    numa_nodes = _bits(nvml.ask("nvmlDeviceGetMemoryAffinity", handle, _MOST_NUMA_NODES // 64, 0))
    return Device(
        "cuda",
        index,
        nvml.text("nvmlDeviceGetName", handle),
        memory.total if memory else 0,
        nvml.text("nvmlDeviceGetUUID", handle),
        _bus_id(nvml.ask("nvmlDeviceGetPciInfo", handle)),
        numa_node=numa_nodes[0] if len(numa_nodes) == 1 else None,
        cpus=_bits(nvml.ask("nvmlDeviceGetCpuAffinity", handle, num_words)),
        busy=busy(nvml, handle),
    )


def _bits(words: Any) -> tuple[int, ...]:
    """The numbers of the bits that are set in words of 64 bits, the lowest first."""
    return tuple(64 * place + bit for place, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1)


def _labels(nvml: Nvml, handles: Mapping[int, Any], devices: tuple[Device, ...]) -> dict[tuple[str, str], str]:
    links = {index: _num_links(nvml, handle) for index, handle in handles.items()}
    labels: dict[tuple[str, str], str] = {}
    for one, other in combinations(devices, 2):
        through_switches = min(links[end.index].get(SWITCHES, 0) for end in (one, other))
        num_links = links[one.index].get(other.pci_bus_id, 0) or through_switches
        level = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", handles[one.index], handles[other.index])
        if num_links or level in ANCESTORS:
            labels[one.label, other.label] = f"NV{num_links}" if num_links else ANCESTORS[level]
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
        target = SWITCHES if kind == SWITCH_TYPE or not remote else _bus_id(remote)
        links[target] = links.get(target, 0) + 1
    return links


def _bus_id(pci: Any) -> str:
    """ "00000000:3B:00.0" as sysfs writes it, "0000:3b:00.0"; empty where it is unknown."""
    domain, _, rest = (str(pci.busId) if pci else "").lower().partition(":")
    return f"{domain[-4:] if domain.startswith('0000') else domain}:{rest}" if rest else domain
