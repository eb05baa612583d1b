"""What the NVIDIA driver knows of its GPUs, through its library NVML.

Every question is asked alone: a driver, a virtual GPU or MIG mode that cannot answer one still answers the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.spec import Device

BUSY_PERCENT = 10
"""Utilisation from which a GPU counts as somebody else's; a desktop stays below."""
BUSY_BYTES = 2**30
"""Memory in use from which it does; the driver alone takes less."""

ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""Labels by nvmlGpuTopologyLevel_t; 0 are two GPUs on one board, which share its switch."""

SWITCH_TYPE = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH."""
SWITCHES = "switches"


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this node, by PCI bus."""

    devices: tuple[Device, ...] = ()
    labels: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Of each pair of indices in ascending order, as far as the driver tells."""
    notes: tuple[str, ...] = ()


def read_gpus(nvml: Any = None) -> Gpus:
    """The GPUs that NVML finds; none without the library or the driver.

    Args:
        nvml: What answers in place of the module pynvml.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return Gpus()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return Gpus()
    try:
        return _read(nvml)
    finally:
        _ask(nvml, "nvmlShutdown")


def busy(utilization_percent: int | None, used_bytes: int | None) -> str:
    """Why a GPU should be left alone: "62 % busy, 31.0 GiB in use"; empty when it is free or nobody knows."""
    if (utilization_percent or 0) < BUSY_PERCENT and (used_bytes or 0) < BUSY_BYTES:
        return ""
    parts = [] if utilization_percent is None else [f"{utilization_percent} % busy"]
    if used_bytes is not None:
        parts.append(f"{used_bytes / 2**30:.1f} GiB in use")
    return ", ".join(parts)


def short_bus_id(text: str) -> str:
    """ "00000000:3B:00.0" as sysfs writes it, "0000:3b:00.0"."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:] if domain.startswith('0000') else domain}:{rest}" if rest else text.strip().lower()


def _read(nvml: Any) -> Gpus:
    num_gpus = _ask(nvml, "nvmlDeviceGetCount") or 0
    handles = {i: handle for i in range(num_gpus) if (handle := _ask(nvml, "nvmlDeviceGetHandleByIndex", i))}
    devices = tuple(_device(nvml, index, handle) for index, handle in handles.items())
    notes = [
        f"GPU{index} could not be opened; nvidia-smi says why." for index in range(num_gpus) if index not in handles
    ]
    notes += [
        f"GPU{index} is in MIG mode: its slices have no links to other GPUs."
        for index, handle in handles.items()
        if (mode := _ask(nvml, "nvmlDeviceGetMigMode", handle)) and mode[0] == 1
    ]
    return Gpus(devices, _labels(nvml, handles, devices), tuple(notes))


def _device(nvml: Any, index: int, handle: Any) -> Device:
    pci = _ask(nvml, "nvmlDeviceGetPciInfo", handle)
    # Version 2 leaves out what the driver keeps for itself.
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle, getattr(nvml, "nvmlMemory_v2", None))
    memory = memory or _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    rates = _ask(nvml, "nvmlDeviceGetUtilizationRates", handle)
    return Device(
        "cuda",
        index,
        _string(_ask(nvml, "nvmlDeviceGetName", handle)),
        memory.total if memory else 0,
        _string(_ask(nvml, "nvmlDeviceGetUUID", handle)),
        short_bus_id(_string(pci.busId)) if pci else "",
        busy=busy(rates.gpu if rates else None, memory.used if memory else None),
    )


def _labels(nvml: Any, handles: Mapping[int, Any], devices: tuple[Device, ...]) -> dict[tuple[int, int], str]:
    links = {index: _num_links(nvml, handle) for index, handle in handles.items()}
    bus_ids = {device.index: device.pci_bus_id for device in devices}
    labels: dict[tuple[int, int], str] = {}
    for one in handles:
        for other in (index for index in handles if index > one):
            # Switches join all GPUs that have links to them.
            num_links = links[one].get(bus_ids[other], 0) or min(links[end].get(SWITCHES, 0) for end in (one, other))
            level = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other])
            if num_links:
                labels[one, other] = f"NV{num_links}"
            elif level in ANCESTORS:
                labels[one, other] = ANCESTORS[level]
    return labels


def _num_links(nvml: Any, handle: Any) -> dict[str, int]:
    """Active NVLinks by the bus id of their other end; those to any switch together.

    An end that the driver cannot name is a switch that a virtual machine does not show.
    """
    links: dict[str, int] = {}
    for number in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, number) != 1:
            continue
        kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
        remote = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
        target = SWITCHES if kind == SWITCH_TYPE or not remote else short_bus_id(_string(remote.busId))
        links[target] = links.get(target, 0) + 1
    return links


def _ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """The answer, or None where this library, driver or GPU has none."""
    try:
        return getattr(nvml, question)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _string(value: Any) -> str:
    """Older releases of the library give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
