"""NVIDIA GPUs: their driver, their health, and whether they reach each other's memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from paceline.hardware.nvml import DriverProblem, Nvml, open_nvml
from paceline.hardware.sources import output_of

UNCORRECTED, VOLATILE, PROHIBITED, READ, RETIREMENT_CAUSES = 1, 0, 2, 0, (0, 1)
"""Values of nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlComputeMode_t, nvmlGpuP2PCapsIndex_t and
nvmlPageRetirementCause_t."""


@dataclass(frozen=True)
class GpuFacts:
    """What NVML tells of one GPU; None where it does not tell."""

    index: int
    name: str = ""
    ecc: bool | None = None
    uncorrected_errors: int | None = None
    """Memory errors since the driver was loaded."""
    retired_pages: int | None = None
    """Memory pages taken out of use after errors; on GPUs before Ampere."""
    is_repair_pending: bool | None = None
    """A page or row of memory is taken out of use at the next reset."""
    is_repair_failed: bool | None = None
    """No spare row was left for a broken one."""
    throttle_reasons: int = 0
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    is_persistent: bool | None = None
    is_prohibited: bool | None = None
    """Its compute mode is "prohibited"."""
    is_partitioned: bool | None = None
    """In MIG mode."""


@dataclass(frozen=True)
class GpusFacts:
    """The GPUs of a node, their driver, and whether they reach each other's memory."""

    driver: str = ""
    problem: str = ""
    """Why the driver could not be asked; empty where it could."""
    num_on_bus: int = 0
    """NVIDIA display and 3D controllers among the PCI devices."""
    gpus: tuple[GpuFacts, ...] = ()
    p2p: dict[str, int] | None = None
    """nvmlGpuP2PStatus_t of every pair, "0-3"; None: not to be had."""
    xids: dict[str, int] | None = None
    """How often the kernel log has each Xid number; None: the log cannot be read."""
    torch_sees: int | None = None
    """GPUs that torch can use; None: not asked."""

    @property
    def num_unseen(self) -> int:
        """GPUs that the driver does not know."""
        return self.num_on_bus - len(self.gpus)


_QUESTIONS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "ecc": ("nvmlDeviceGetEccMode", lambda modes: bool(modes[0])),
    "throttle_reasons": ("nvmlDeviceGetCurrentClocksThrottleReasons", int),
    "power_limit_w": ("nvmlDeviceGetPowerManagementLimit", lambda milliwatts: milliwatts / 1000),
    "default_power_limit_w": ("nvmlDeviceGetPowerManagementDefaultLimit", lambda milliwatts: milliwatts / 1000),
    "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth", int),
    "max_pcie_width": ("nvmlDeviceGetMaxPcieLinkWidth", int),
    "is_persistent": ("nvmlDeviceGetPersistenceMode", bool),
    "is_prohibited": ("nvmlDeviceGetComputeMode", lambda mode: mode == PROHIBITED),
    "is_partitioned": ("nvmlDeviceGetMigMode", lambda modes: bool(modes[0])),
}
"""For fields of `GpuFacts`, the NVML function that tells it, and how its answer is converted."""


def collect_gpus(library: Any = None, num_on_bus: int = 0) -> GpusFacts:
    """Ask NVML.

    Args:
        library: what answers in place of the module pynvml.
    """
    try:
        with open_nvml(library) as nvml:
            # A GPU that has fallen off the bus has no handle.
            indices = range(nvml.demand("nvmlDeviceGetCount"))
            handles = [nvml.demand("nvmlDeviceGetHandleByIndex", index) for index in indices]
            return GpusFacts(
                driver=nvml.text("nvmlSystemGetDriverVersion"),
                num_on_bus=max(num_on_bus, len(handles)),
                gpus=tuple(_gpu(nvml, index, handle) for index, handle in enumerate(handles)),
                p2p=_p2p(nvml, handles),
            )
    except DriverProblem as problem:
        return GpusFacts(problem=str(problem), num_on_bus=num_on_bus)


def _gpu(nvml: Nvml, index: int, gpu: Any) -> GpuFacts:
    answers = {name: (nvml.ask(question, gpu), convert) for name, (question, convert) in _QUESTIONS.items()}
    facts = {name: convert(answer) for name, (answer, convert) in answers.items() if answer is not None}
    retired = [nvml.ask("nvmlDeviceGetRetiredPages", gpu, cause) for cause in RETIREMENT_CAUSES]
    num_retired = [len(pages) for pages in retired if pages is not None]
    pages_pending = nvml.ask("nvmlDeviceGetRetiredPagesPendingStatus", gpu)
    _, _, rows_pending, repair_failed = nvml.ask("nvmlDeviceGetRemappedRows", gpu) or (None,) * 4
    pending = [bool(answer) for answer in (pages_pending, rows_pending) if answer is not None]
    return GpuFacts(
        index,
        nvml.text("nvmlDeviceGetName", gpu),
        uncorrected_errors=nvml.ask("nvmlDeviceGetTotalEccErrors", gpu, UNCORRECTED, VOLATILE),
        retired_pages=sum(num_retired) if num_retired else None,
        is_repair_pending=any(pending) if pending else None,
        is_repair_failed=None if repair_failed is None else bool(repair_failed),
        **facts,
    )


def _p2p(nvml: Nvml, handles: Sequence[Any]) -> dict[str, int] | None:
    answers = {
        f"{one}-{other}": nvml.ask("nvmlDeviceGetP2PStatus", handles[one], handles[other], READ)
        for one, other in combinations(range(len(handles)), 2)
    }
    return None if None in answers.values() else {pair: int(status) for pair, status in answers.items()}


def read_kernel_log() -> str | None:
    """What `dmesg` shows; None where it is not there or may not be read."""
    return output_of(["dmesg"], timeout_s=10)


def count_xids(kernel_log: str) -> dict[str, int]:
    """How often each Xid number stands in lines such as "NVRM: Xid (PCI:0000:3b:00): 79, pid=…"."""
    return dict(Counter(re.findall(r"NVRM: Xid \([^)]*\): (\d+)", kernel_log)))
