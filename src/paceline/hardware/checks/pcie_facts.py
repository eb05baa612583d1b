"""Facts about PCIe access control and address translation, which decide where copies between GPUs go."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from paceline.hardware.sources import entries, output_of, read_text

NVIDIA = "0x10de"


@dataclass(frozen=True)
class PcieFacts:
    """What decides where a copy between two PCIe devices goes."""

    acs_bridges: tuple[str, ...] | None = None
    """Bridges with access control on; None: lspci is missing or may not read them."""
    kernel_arguments: str = ""
    iommus: tuple[str, ...] = ()
    """The entries of /sys/class/iommu; none: address translation is off."""
    gpu_domains: dict[str, str] = field(default_factory=dict)
    """The type of each GPU's IOMMU group: "identity" passes addresses through, "DMA" and "DMA-FQ" translate."""
    is_virtual: bool = False
    """Whether the node is a virtual machine, whose host needs both access control and address translation."""
    num_gpus: int = 0

    @property
    def translating(self) -> list[str]:
        """The GPUs whose addresses are translated, or where these are not known the IOMMUs that translate."""
        if self.gpu_domains:
            return [gpu for gpu, kind in self.gpu_domains.items() if kind.startswith("DMA")]
        passes_through = {"iommu=pt", "iommu.passthrough=1"}.intersection(self.kernel_arguments.split())
        return [] if passes_through else list(self.iommus)

    @property
    def iommu_vendor(self) -> str:
        return "amd" if any("ivhd" in name or name.startswith("amd") for name in self.iommus) else "intel"


def collect_pcie() -> PcieFacts:
    gpus = nvidia_gpus(Path("/sys/bus/pci/devices"))
    return PcieFacts(
        acs_bridges=acs_bridges(output_of(["lspci", "-vvv"], timeout_s=30)),
        kernel_arguments=read_text(Path("/proc/cmdline")),
        iommus=tuple(entry.name for entry in entries(Path("/sys/class/iommu"))),
        gpu_domains={gpu.name: kind for gpu in gpus if (kind := read_text(gpu / "iommu_group/type"))},
        is_virtual=bool(re.search(r"^flags\s*:.*\bhypervisor\b", read_text(Path("/proc/cpuinfo")), re.MULTILINE)),
        num_gpus=len(gpus),
    )


def nvidia_gpus(devices: Path) -> list[Path]:
    """The folders of NVIDIA's display (class 03) controllers."""
    return [
        device
        for device in entries(devices)
        if read_text(device / "vendor") == NVIDIA and read_text(device / "class").startswith("0x03")
    ]


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
