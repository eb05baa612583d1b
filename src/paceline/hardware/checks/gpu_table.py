"""Checks of GPUs and of what is between them: a table of what can be wrong, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.hardware.checks.engine import Check, error, warning, words
from paceline.hardware.checks.gpu_facts import GpuFacts, GpusFacts
from paceline.hardware.checks.node_facts import NodeFacts
from paceline.hardware.checks.pcie_facts import PcieFacts

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
class _Driver:
    """The driver of GPUs, and what torch is built for."""

    driver: str
    torch: str
    cuda: str

    @property
    def needed(self) -> int:
        """The oldest driver branch that runs this CUDA; 0 where that is not known."""
        return MIN_DRIVER.get(int(self.cuda.split(".")[0]), 0)

    @property
    def is_too_old(self) -> bool:
        branch = self.driver.split(".")[0]
        return branch.isdigit() and int(branch) < self.needed


@dataclass(frozen=True)
class _NoPeerAccess:
    """Pairs of GPUs that cannot copy to each other directly, for one reason: what they send goes through memory."""

    pairs: str
    why: str
    are_all: bool
    """Whether there is no other pair."""


def _driver(node: NodeFacts) -> list[_Driver] | None:
    versions = node.system.versions
    driver = _Driver(node.gpus.driver, versions.get("torch", ""), versions.get("CUDA", ""))
    return [driver] if node.gpus.gpus else None


def _no_peer_access(node: NodeFacts) -> list[_NoPeerAccess] | None:
    p2p = node.gpus.p2p
    if p2p is None or not node.gpus.gpus:
        return None
    by_reason = {why: [pair for pair, answer in p2p.items() if answer == status] for status, why in P2P.items()}
    return [_NoPeerAccess(words(pairs), why, len(pairs) == len(p2p)) for why, pairs in by_reason.items() if pairs]


def _hardware_xids(node: NodeFacts) -> list[str] | None:
    """All of them in one text."""
    xids = node.gpus.xids
    if xids is None or not node.gpus.gpus:
        return None
    bad = [f"Xid {number} ({HARDWARE_XIDS[int(number)]})" for number in xids if int(number) in HARDWARE_XIDS]
    return [words(bad)] if bad else []


def _gpus(node: NodeFacts) -> tuple[GpuFacts, ...] | None:
    return node.gpus.gpus or None


def throttling(gpu: GpuFacts) -> list[str]:
    return [reason for bit, reason in THROTTLING.items() if gpu.throttle_reasons & bit]


RESET = "Take its programs down and reset it: sudo nvidia-smi --gpu-reset -i {index}"

# Errors of GPU memory are judged by NVIDIA's "GPU Memory Error Management" and "Dynamic Page Retirement".
GPU_CHECKS: tuple[Check[NodeFacts, Any], ...] = (
    Check[NodeFacts, GpusFacts](
        "gpu driver",
        lambda node: [node.gpus],
        lambda node: (
            f"{len(node.gpus.gpus)} GPUs answer to the driver {node.gpus.driver}."
            if node.gpus.gpus
            else "There is no NVIDIA GPU: workers compute on CPU."
        ),
        warning(
            lambda gpus: gpus.num_unseen > 0 and "not installed" in gpus.problem,
            "{num_on_bus} NVIDIA GPUs are on the PCI bus, but they were not looked at: {problem}.",
            "pip install nvidia-ml-py",
        ),
        error(
            lambda gpus: gpus.num_unseen > 0,
            lambda gpus: (
                f"{gpus.num_on_bus} NVIDIA GPUs are on the PCI bus, but the driver knows {len(gpus.gpus)}"
                f"{f' ({gpus.problem})' if gpus.problem else ''}."
            ),
            "Install the NVIDIA driver if there is none, else look for NVRM in dmesg and reboot; in a container start "
            "it with --gpus all.",
        ),
    ),
    Check[NodeFacts, _Driver](
        "driver and CUDA",
        _driver,
        "The driver {gpus.driver} runs CUDA {system.versions[CUDA]}, which torch is built for.",
        error(
            lambda found: not found.cuda,
            "There are GPUs, but torch {torch} is built for CPU alone.",
            "Install a torch built for CUDA; pytorch.org/get-started names the command.",
        ),
        error(
            lambda found: found.is_too_old,
            "The driver {driver} is too old for torch's CUDA {cuda}, which needs {needed} or later.",
            "Update the driver to {needed} or later, or install a torch built for an older CUDA.",
        ),
    ),
    Check[NodeFacts, GpusFacts](
        "torch and GPUs",
        lambda node: [node.gpus] if node.gpus.gpus and node.gpus.torch_sees is not None else None,
        lambda node: f"Torch can use {node.gpus.torch_sees} of {len(node.gpus.gpus)} GPUs.",
        error(
            lambda gpus: gpus.torch_sees == 0,
            lambda gpus: f"Torch can use none of {len(gpus.gpus)} GPUs.",
            'See what it says: python -c "import torch; torch.cuda.init()"; on NVSwitch systems nvidia-fabricmanager '
            "must run.",
        ),
    ),
    Check[NodeFacts, _NoPeerAccess](
        "peer-to-peer",
        _no_peer_access,
        lambda node: (
            f"All {len(node.gpus.p2p)} pairs of GPUs reach each other's memory."
            if node.gpus.p2p
            else "One GPU has no peers on this node."
        ),
        warning(
            bool,
            "The GPUs {pairs} cannot reach each other's memory: {why}; what they send goes through the node's memory.",
            lambda found: (
                "Nothing to set where the GPU model has no such ability; else update driver and BIOS."
                if found.are_all
                else "Choose devices that can: paceline topo --pick 2"
            ),
        ),
    ),
    Check[NodeFacts, str](
        "gpu errors",
        _hardware_xids,
        "The kernel log has no GPU hardware error.",
        warning(
            bool,
            lambda xids: f"The kernel log has GPU hardware errors since the boot: {xids}.",
            "See which GPU: sudo dmesg | grep Xid; if it comes back after a reboot, have it replaced.",
        ),
    ),
    Check[NodeFacts, GpuFacts](
        "gpu memory",
        _gpus,
        "No GPU has memory errors that matter.",
        error(
            lambda gpu: gpu.is_repair_failed,
            "GPU {index} has no spare memory row left for a broken one.",
            "Have GPU {index} replaced.",
        ),
        error(
            lambda gpu: gpu.is_repair_pending,
            "GPU {index} has broken memory that its next reset takes out of use.",
            RESET,
        ),
        error(
            lambda gpu: gpu.uncorrected_errors,
            "GPU {index} had {uncorrected_errors} uncorrectable memory errors since the driver was loaded.",
            f"{RESET}; if they come back, have it replaced.",
        ),
        error(
            lambda gpu: (gpu.retired_pages or 0) >= 60,
            "GPU {index} has retired {retired_pages} memory pages of 64 at most.",
            "Have GPU {index} replaced.",
        ),
        warning(
            lambda gpu: gpu.ecc is False,
            "GPU {index} could correct memory errors, but does not: a flipped bit changes a result in silence.",
            "sudo nvidia-smi -i {index} -e 1, then reboot",
        ),
    ),
    Check[NodeFacts, GpuFacts](
        "gpu speed",
        _gpus,
        "No GPU is slowed down.",
        warning(
            throttling,
            lambda gpu: f"GPU {gpu.index} runs slower than it could: {words(throttling(gpu))}.",
            "Look at its cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
            hides_others=False,
        ),
        warning(
            lambda gpu: gpu.throttle_reasons & HELD_CLOCKS,
            "The clocks of GPU {index} are held down by a setting.",
            "sudo nvidia-smi -i {index} -rac",
            hides_others=False,
        ),
        warning(
            lambda gpu: 0 < (gpu.power_limit_w or 0) < (gpu.default_power_limit_w or 0),
            "GPU {index} may take {power_limit_w:g} W, less than its usual {default_power_limit_w:g} W.",
            "sudo nvidia-smi -i {index} -pl {default_power_limit_w:g}",
            hides_others=False,
        ),
        warning(
            lambda gpu: 0 < (gpu.pcie_width or 0) < (gpu.max_pcie_width or 0),
            "GPU {index} has {pcie_width} of its {max_pcie_width} PCIe lanes.",
            "Put it into a full-width slot, or seat card and riser again.",
        ),
    ),
    Check[NodeFacts, GpuFacts](
        "gpu modes",
        _gpus,
        "Every GPU is open to programs.",
        error(
            lambda gpu: gpu.is_prohibited,
            "The compute mode of GPU {index} lets no program in.",
            "sudo nvidia-smi -i {index} -c DEFAULT",
            hides_others=False,
        ),
        warning(
            lambda gpu: gpu.is_partitioned,
            "GPU {index} is in MIG mode: its parts cannot reach each other's memory, and a worker gets one part.",
            "For training on whole GPUs: sudo nvidia-smi -i {index} -mig 0",
            hides_others=False,
        ),
        warning(
            lambda gpu: gpu.is_persistent is False,
            "The driver forgets GPU {index} when nobody uses it, so every start waits for it.",
            "sudo nvidia-smi -i {index} -pm 1",
        ),
    ),
)


# --- PCIe: access control and address translation send copies between GPUs through the processor, or break them ---


def _copying(node: NodeFacts) -> list[PcieFacts] | None:
    """Only several GPUs on a machine of their own copy to each other."""
    return [node.pcie] if node.pcie.num_gpus >= 2 and not node.pcie.is_virtual else None


PCIE_CHECKS: tuple[Check[NodeFacts, Any], ...] = (
    Check[NodeFacts, PcieFacts](
        "PCIe ACS and IOMMU",
        lambda node: None if _copying(node) else [],
        "No two GPUs on a bare machine: nothing to look for.",
    ),
    Check[NodeFacts, PcieFacts](
        "PCIe ACS",
        _copying,
        "No PCIe bridge sends copies between GPUs through the processor.",
        warning(
            lambda pcie: pcie.acs_bridges is None,
            "Whether PCIe access control is on cannot be seen: lspci is missing, or shows capabilities to root alone.",
            "sudo lspci -vvv | grep ACSCtl shows it: every SrcValid should be SrcValid-",
        ),
        warning(
            lambda pcie: pcie.acs_bridges,
            lambda pcie: (
                f"PCIe access control is on at {len(pcie.acs_bridges or ())} bridges "
                f"({words(pcie.acs_bridges or ())}): copies between GPUs go through the processor, slowly, or hang."
            ),
            "Turn ACS off in the BIOS, or until the next boot at each bridge: sudo setpci -s {acs_bridges[0]} "
            "ECAP_ACS+0x6.w=0000",
        ),
    ),
    # CUDA does not support copies between GPUs on a bare machine whose IOMMU translates (CUDA C++ Programming Guide,
    # "IOMMU on Linux").
    Check[NodeFacts, PcieFacts](
        "IOMMU",
        _copying,
        "No IOMMU translates the addresses of GPUs.",
        warning(
            lambda pcie: pcie.translating,
            lambda pcie: (
                (
                    f"Addresses of the GPUs {words(pcie.translating)} are translated by an IOMMU"
                    if pcie.gpu_domains
                    else f"The IOMMU ({words(pcie.translating)}) translates addresses"
                )
                + ": direct copies between GPUs may give wrong numbers or hang."
            ),
            "Add iommu=pt (or {iommu_vendor}_iommu=off) to the kernel's arguments in /etc/default/grub, run "
            "update-grub and reboot; until then train with NCCL_P2P_DISABLE=1.",
        ),
    ),
)
