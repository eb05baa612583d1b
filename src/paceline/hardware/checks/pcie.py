"""The PCIe trap: access control and address translation send GPU-to-GPU copies through the processor, or break them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.hardware.checks.finding import Finding, ok, warning, words
from paceline.hardware.checks.system import read

NVIDIA = "0x10de"


@dataclass(frozen=True)
class PcieFacts:
    """What decides where a copy between two PCIe devices goes."""

    acs_bridges: tuple[str, ...] | None = None
    """Bridges that send everything up to the root; None: lspci is missing or may not look."""
    kernel_arguments: str = ""
    iommus: tuple[str, ...] = ()
    """As /sys/class/iommu lists them; none: address translation is off."""
    gpu_domains: dict[str, str] = field(default_factory=dict)
    """The type of each GPU's IOMMU group: "identity" passes addresses through, "DMA" and "DMA-FQ" translate."""
    is_virtual: bool = False
    """A virtual machine: the node below it has to use both."""
    num_gpus: int = 0


def collect_pcie(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> PcieFacts:
    gpus = nvidia_gpus(sys / "bus/pci/devices")
    iommus = sys / "class/iommu"
    return PcieFacts(
        acs_bridges=acs_bridges(_lspci()),
        kernel_arguments=read(proc / "cmdline"),
        iommus=tuple(sorted(entry.name for entry in iommus.iterdir())) if iommus.is_dir() else (),
        gpu_domains={gpu.name: kind for gpu in gpus if (kind := read(gpu / "iommu_group/type"))},
        is_virtual=bool(re.search(r"^flags\s*:.*\bhypervisor\b", read(proc / "cpuinfo"), re.MULTILINE)),
        num_gpus=len(gpus),
    )


def nvidia_gpus(devices: Path) -> list[Path]:
    """The folders of NVIDIA's display (class 03) controllers."""
    if not devices.is_dir():
        return []
    return sorted(
        device
        for device in devices.iterdir()
        if read(device / "vendor") == NVIDIA and read(device / "class").startswith("0x03")
    )


def _lspci() -> str | None:
    try:
        return subprocess.run(
            ["lspci", "-vvv"], capture_output=True, text=True, errors="replace", timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def acs_bridges(listing: str | None) -> tuple[str, ...] | None:
    """The PCI bridges whose access control is on, from the text of `lspci -vvv`.

    "SrcValid+" in the line ACSCtl is the mark that NVIDIA's NCCL guide names (section "PCI Access Control Services").

    Returns:
        None where lspci was not allowed to read capabilities, as happens to users other than root.
    """
    if listing is None or ("ACSCtl" not in listing and "<access denied>" in listing):
        return None
    bridges = []
    for device in re.split(r"\n(?=\S)", listing):
        if "PCI bridge" in device.partition("\n")[0] and re.search(r"ACSCtl:.*SrcValid\+", device):
            bridges.append(device.split()[0])
    return tuple(bridges)


def check_pcie(facts: PcieFacts) -> list[Finding]:
    """Only GPUs on a machine of their own, and at least two of them, can fall into the trap."""
    if facts.num_gpus < 2 or facts.is_virtual:
        return ok("PCIe ACS and IOMMU", "No two GPUs on a bare machine: nothing to look for.")
    return [
        *check_acs(facts.acs_bridges),
        *check_iommu(facts.kernel_arguments, facts.iommus, facts.gpu_domains),
    ]


def check_acs(bridges: Sequence[str] | None) -> list[Finding]:
    check = "PCIe ACS"
    if bridges is None:
        return warning(
            check,
            "Whether PCIe access control is on cannot be seen: lspci is missing, or shows capabilities to root alone.",
            "sudo lspci -vvv | grep ACSCtl shows it: every SrcValid should be SrcValid-",
        )
    if not bridges:
        return ok(check, "No PCIe bridge sends copies between GPUs through the processor.")
    return warning(
        check,
        f"PCIe access control is on at {len(bridges)} bridges ({words(list(bridges))}): copies between GPUs go through "
        "the processor, slowly, or hang.",
        f"Turn ACS off in the BIOS, or until the next boot at each bridge: sudo setpci -s {bridges[0]} "
        "ECAP_ACS+0x6.w=0000",
    )


def check_iommu(kernel_arguments: str, iommus: Sequence[str], gpu_domains: dict[str, str]) -> list[Finding]:
    """CUDA does not support copies between GPUs on a bare machine whose IOMMU translates (CUDA C++ Programming Guide,
    "IOMMU on Linux")."""
    check = "IOMMU"
    arguments = kernel_arguments.split()
    if gpu_domains:
        translates = [gpu for gpu, kind in gpu_domains.items() if kind.startswith("DMA")]
        what = f"Addresses of the GPUs {words(translates)} are translated by an IOMMU"
    else:
        translates = list(iommus) if "iommu=pt" not in arguments and "iommu.passthrough=1" not in arguments else []
        what = f"The IOMMU ({words(translates)}) translates addresses"
    if not translates:
        return ok(check, "No IOMMU translates the addresses of GPUs.")
    vendor = "amd_iommu=off" if any("ivhd" in name or name.startswith("amd") for name in iommus) else "intel_iommu=off"
    return warning(
        check,
        f"{what}: direct copies between GPUs may give wrong numbers or hang.",
        f"Add iommu=pt (or {vendor}) to the kernel's arguments in /etc/default/grub, run update-grub and reboot; until "
        "then train with NCCL_P2P_DISABLE=1.",
    )
