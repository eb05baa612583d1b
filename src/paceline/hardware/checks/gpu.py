"""NVIDIA GPUs: their driver, their health, and whether they reach each other's memory."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.hardware.checks.finding import Finding, error, ok, warning, words

MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver branch that runs programs built for each major version of CUDA, as far as minor version
compatibility goes: table 1 of NVIDIA's "CUDA Compatibility", release 590."""

THROTTLING = {
    0x08: "the hardware slows it down",
    0x20: "it is too hot",
    0x40: "it is so hot that the hardware slows it down",
    0x80: "the power supply slows it down",
}
"""The bits of nvmlClocksThrottleReasons* (nvml.h) that mean trouble. A power cap under load is no trouble."""
HELD_CLOCKS = 0x02

P2P = {
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "their places on the PCIe buses do not allow it",
    4: "it is disabled in the driver's settings",
    5: "it is not supported",
    6: "the driver does not say why",
}
"""nvmlGpuP2PStatus_t (nvml.h), without 0, which is fine."""

UNCORRECTED, VOLATILE, PROHIBITED, READ, RETIREMENT_CAUSES = 1, 0, 2, 0, (0, 1)
"""Of nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlComputeMode_t, nvmlGpuP2PCapsIndex_t and
nvmlPageRetirementCause_t."""

HARDWARE_XIDS = {
    48: "uncorrectable memory error",
    63: "memory page or row replaced",
    64: "memory page or row could not be replaced",
    74: "NVLink error",
    79: "fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its controller does not answer",
}
"""Driver errors that are not a program's own doing: NVIDIA's "Xid Errors"."""


@dataclass(frozen=True)
class GpuFacts:
    """What NVML tells of one GPU; None where it does not tell."""

    index: int
    name: str = ""
    uuid: str = ""
    pci_bus_id: str = ""
    ecc: bool | None = None
    uncorrected_errors: int | None = None
    """Of memory, since the driver was loaded."""
    retired_pages: int | None = None
    """Taken out of use after memory errors; on GPUs before Ampere."""
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
    """Its compute mode lets no program in."""
    is_partitioned: bool | None = None
    """In MIG mode."""


@dataclass(frozen=True)
class GpusFacts:
    """The GPUs of a node and what is between them."""

    driver: str = ""
    driver_cuda: str = ""
    """The newest CUDA the driver has itself."""
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


def collect_gpus(nvml: Any = None, num_on_bus: int = 0) -> GpusFacts:
    """Ask NVML.

    Args:
        nvml: the module pynvml or what behaves like it; None: pynvml, if it is installed.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return GpusFacts(problem="nvidia-ml-py is not installed", num_on_bus=num_on_bus)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        return GpusFacts(problem=str(problem), num_on_bus=num_on_bus)
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        cuda = _ask(nvml, "nvmlSystemGetCudaDriverVersion") or 0
        return GpusFacts(
            driver=_text(_ask(nvml, "nvmlSystemGetDriverVersion")),
            driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            num_on_bus=max(num_on_bus, len(handles)),
            gpus=tuple(_gpu(nvml, index, handle) for index, handle in enumerate(handles)),
            p2p=_p2p(nvml, handles),
        )
    except nvml.NVMLError as problem:  # a GPU that has fallen off the bus has no handle
        return GpusFacts(
            driver=_text(_ask(nvml, "nvmlSystemGetDriverVersion")), problem=str(problem), num_on_bus=num_on_bus
        )
    finally:
        nvml.nvmlShutdown()


def _ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """The answer, or None where this GPU, driver or binding has none."""
    try:
        return getattr(nvml, question)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _text(answer: Any) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer or "")


def _gpu(nvml: Any, index: int, gpu: Any) -> GpuFacts:
    pci = _ask(nvml, "nvmlDeviceGetPciInfo", gpu)
    ecc = _ask(nvml, "nvmlDeviceGetEccMode", gpu)
    # Uncorrected ones, since the driver was loaded.
    errors = _ask(nvml, "nvmlDeviceGetTotalEccErrors", gpu, UNCORRECTED, VOLATILE)
    retired = [
        pages
        for cause in RETIREMENT_CAUSES
        if (pages := _ask(nvml, "nvmlDeviceGetRetiredPages", gpu, cause)) is not None
    ]
    pages_pending = _ask(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", gpu)
    rows = _ask(nvml, "nvmlDeviceGetRemappedRows", gpu)  # corrected, uncorrected, pending, failed
    mig = _ask(nvml, "nvmlDeviceGetMigMode", gpu)
    pending = [bool(answer) for answer in (pages_pending, None if rows is None else rows[2]) if answer is not None]
    limit, default = (
        _ask(nvml, f"nvmlDeviceGetPowerManagement{kind}", gpu) for kind in ("Limit", "DefaultLimit")
    )  # milliwatts
    compute_mode = _ask(nvml, "nvmlDeviceGetComputeMode", gpu)
    persistence = _ask(nvml, "nvmlDeviceGetPersistenceMode", gpu)
    return GpuFacts(
        index=index,
        name=_text(_ask(nvml, "nvmlDeviceGetName", gpu)),
        uuid=_text(_ask(nvml, "nvmlDeviceGetUUID", gpu)),
        pci_bus_id="" if pci is None else sysfs_bus_id(_text(pci.busId)),
        ecc=None if ecc is None else bool(ecc[0]),
        uncorrected_errors=errors,
        retired_pages=sum(map(len, retired)) if retired else None,
        is_repair_pending=any(pending) if pending else None,
        is_repair_failed=None if rows is None else bool(rows[3]),
        throttle_reasons=_ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", gpu) or 0,
        power_limit_w=None if limit is None else limit / 1000,
        default_power_limit_w=None if default is None else default / 1000,
        pcie_width=_ask(nvml, "nvmlDeviceGetCurrPcieLinkWidth", gpu),
        max_pcie_width=_ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", gpu),
        is_persistent=None if persistence is None else bool(persistence),
        is_prohibited=None if compute_mode is None else compute_mode == PROHIBITED,
        is_partitioned=None if mig is None else bool(mig[0]),
    )


def sysfs_bus_id(bus_id: str) -> str:
    """ "00000000:3B:00.0", NVML's way of writing it, as "0000:3b:00.0", sysfs's."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else bus_id.lower()


def _p2p(nvml: Any, handles: Sequence[Any]) -> dict[str, int] | None:
    answers: dict[str, int] = {}
    for one in range(len(handles)):
        for other in range(one + 1, len(handles)):
            status = _ask(nvml, "nvmlDeviceGetP2PStatus", handles[one], handles[other], READ)
            if status is None:
                return None
            answers[f"{one}-{other}"] = int(status)
    return answers


def read_kernel_log() -> str | None:
    """What `dmesg` shows; None where it is not there or may not be read."""
    try:
        return subprocess.run(
            ["dmesg"], capture_output=True, text=True, errors="replace", timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def count_xids(kernel_log: str) -> dict[str, int]:
    """How often each Xid number stands in lines such as "NVRM: Xid (PCI:0000:3b:00): 79, pid=…"."""
    counts: dict[str, int] = {}
    for number in re.findall(r"NVRM: Xid \([^)]*\): (\d+)", kernel_log):
        counts[number] = counts.get(number, 0) + 1
    return counts


def check_gpus(facts: GpusFacts, versions: Mapping[str, str]) -> list[Finding]:
    """Everything about GPUs.

    Args:
        versions: of "torch", and of "CUDA" where torch is built for it.
    """
    if not facts.gpus:
        return check_driver_answers(facts)
    findings = [
        *check_driver_answers(facts),
        *check_driver_version(facts.driver, versions),
        *check_torch_sees(facts.torch_sees, len(facts.gpus)),
        *check_p2p(facts.p2p),
        *check_xids(facts.xids),
    ]
    findings += each(facts.gpus, check_memory) or ok("gpu memory", "No GPU has memory errors that matter.")
    findings += each(facts.gpus, check_speed) or ok("gpu speed", "No GPU is slowed down.")
    findings += each(facts.gpus, check_modes) or ok("gpu modes", "Every GPU is open to programs.")
    return findings


def each(gpus: Sequence[GpuFacts], check: Callable[[GpuFacts], list[Finding]]) -> list[Finding]:
    return [finding for gpu in gpus for finding in check(gpu)]


def check_driver_answers(facts: GpusFacts) -> list[Finding]:
    """A node without GPUs is fine; one whose GPUs do not answer is not."""
    check = "gpu driver"
    missing = facts.num_on_bus - len(facts.gpus)
    if missing > 0 and "not installed" in facts.problem:
        return warning(
            check,
            f"{facts.num_on_bus} NVIDIA GPUs are on the PCI bus, but they were not looked at: {facts.problem}.",
            "pip install nvidia-ml-py",
        )
    if missing > 0:
        return error(
            check,
            f"{facts.num_on_bus} NVIDIA GPUs are on the PCI bus, but the driver knows {len(facts.gpus)}"
            f"{f' ({facts.problem})' if facts.problem else ''}.",
            "Install the NVIDIA driver if there is none, else look for NVRM in dmesg and reboot; in a container start "
            "it with --gpus all.",
        )
    if not facts.gpus:
        return ok(check, "There is no NVIDIA GPU: workers compute on CPU.")
    return ok(check, f"{len(facts.gpus)} GPUs answer to the driver {facts.driver}.")


def check_driver_version(driver: str, versions: Mapping[str, str]) -> list[Finding]:
    check = "driver and CUDA"
    cuda = versions.get("CUDA")
    if cuda is None:
        return error(
            check,
            f"There are GPUs, but torch {versions.get('torch', '')} is built for CPU alone.",
            "Install a torch built for CUDA; pytorch.org/get-started names the command.",
        )
    branch = driver.split(".")[0]
    needed = MIN_DRIVER.get(int(cuda.split(".")[0]))
    if needed is None or not branch.isdigit() or int(branch) >= needed:
        return ok(check, f"The driver {driver} runs CUDA {cuda}, which torch is built for.")
    return error(
        check,
        f"The driver {driver} is too old for torch's CUDA {cuda}, which needs {needed} or later.",
        f"Update the driver to {needed} or later, or install a torch built for an older CUDA.",
    )


def check_torch_sees(num_seen: int | None, num_gpus: int) -> list[Finding]:
    check = "torch and GPUs"
    if num_seen is None:
        return []
    if num_seen == 0:
        return error(
            check,
            f"Torch can use none of {num_gpus} GPUs.",
            'See what it says: python -c "import torch; torch.cuda.init()"; on NVSwitch systems '
            "nvidia-fabricmanager must run.",
        )
    return ok(check, f"Torch can use {num_seen} of {num_gpus} GPUs.")


def check_memory(gpu: GpuFacts) -> list[Finding]:
    """Errors of GPU memory, by NVIDIA's "GPU Memory Error Management" and "Dynamic Page Retirement"."""
    check, name = "gpu memory", f"GPU {gpu.index}"
    reset = f"Take its programs down and reset it: sudo nvidia-smi --gpu-reset -i {gpu.index}"
    if gpu.is_repair_failed:
        return error(check, f"{name} has no spare memory row left for a broken one.", f"Have {name} replaced.")
    if gpu.is_repair_pending:
        return error(check, f"{name} has broken memory that its next reset takes out of use.", reset)
    if gpu.uncorrected_errors:
        return error(
            check,
            f"{name} had {gpu.uncorrected_errors} uncorrectable memory errors since the driver was loaded.",
            f"{reset}; if they come back, have it replaced.",
        )
    if (gpu.retired_pages or 0) >= 60:
        return error(
            check, f"{name} has retired {gpu.retired_pages} memory pages of 64 at most.", f"Have {name} replaced."
        )
    if gpu.ecc is False:
        return warning(
            check,
            f"{name} could correct memory errors, but does not: a flipped bit changes a result in silence.",
            f"sudo nvidia-smi -i {gpu.index} -e 1, then reboot",
        )
    return []


def check_speed(gpu: GpuFacts) -> list[Finding]:
    check, name = "gpu speed", f"GPU {gpu.index}"
    findings = []
    reasons = [reason for bit, reason in THROTTLING.items() if gpu.throttle_reasons & bit]
    if reasons:
        findings += warning(
            check,
            f"{name} runs slower than it could: {words(reasons)}.",
            "Look at its cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
        )
    if gpu.throttle_reasons & HELD_CLOCKS:
        findings += warning(
            check, f"The clocks of {name} are held down by a setting.", f"sudo nvidia-smi -i {gpu.index} -rac"
        )
    if gpu.power_limit_w and gpu.default_power_limit_w and gpu.power_limit_w < gpu.default_power_limit_w:
        findings += warning(
            check,
            f"{name} may take {gpu.power_limit_w:g} W, less than its usual {gpu.default_power_limit_w:g} W.",
            f"sudo nvidia-smi -i {gpu.index} -pl {gpu.default_power_limit_w:g}",
        )
    if gpu.pcie_width and gpu.max_pcie_width and gpu.pcie_width < gpu.max_pcie_width:
        findings += warning(
            check,
            f"{name} has {gpu.pcie_width} of its {gpu.max_pcie_width} PCIe lanes.",
            "Put it into a full-width slot, or seat card and riser again.",
        )
    return findings


def check_modes(gpu: GpuFacts) -> list[Finding]:
    check, name = "gpu modes", f"GPU {gpu.index}"
    findings = []
    if gpu.is_prohibited:
        findings += error(
            check, f"The compute mode of {name} lets no program in.", f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
        )
    if gpu.is_partitioned:
        findings += warning(
            check,
            f"{name} is in MIG mode: its parts cannot reach each other's memory, and a worker gets one part.",
            f"For training on whole GPUs: sudo nvidia-smi -i {gpu.index} -mig 0",
        )
    if gpu.is_persistent is False:
        findings += warning(
            check,
            f"The driver forgets {name} when nobody uses it, so every start waits for it.",
            f"sudo nvidia-smi -i {gpu.index} -pm 1",
        )
    return findings


def check_p2p(p2p: Mapping[str, int] | None) -> list[Finding]:
    """Pairs that cannot copy to each other directly: what they send goes through the node's memory."""
    check = "peer-to-peer"
    if not p2p:
        return [] if p2p is None else ok(check, "One GPU has no peers on this node.")
    findings = []
    for status, why in P2P.items():
        pairs = [pair for pair, answer in p2p.items() if answer == status]
        if pairs:
            findings += warning(
                check,
                f"The GPUs {words(pairs)} cannot reach each other's memory: {why}; what they send goes through the "
                "node's memory.",
                "Choose devices that can: paceline topo --pick 2"
                if len(pairs) < len(p2p)
                else "Nothing to set where the GPU model has no such ability; else update driver and BIOS.",
            )
    return findings or ok(check, f"All {len(p2p)} pairs of GPUs reach each other's memory.")


def check_xids(xids: Mapping[str, int] | None) -> list[Finding]:
    check = "gpu errors"
    if xids is None:
        return []
    bad = [f"Xid {number} ({HARDWARE_XIDS[int(number)]})" for number in xids if int(number) in HARDWARE_XIDS]
    if not bad:
        return ok(check, "The kernel log has no GPU hardware error.")
    return warning(
        check,
        f"The kernel log has GPU hardware errors since the boot: {words(bad)}.",
        "See which GPU: sudo dmesg | grep Xid; if it comes back after a reboot, have it replaced.",
    )
