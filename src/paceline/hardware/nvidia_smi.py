"""The command nvidia-smi, for what its text alone can tell."""

from __future__ import annotations

from paceline.hardware.nvml import busy, short_bus_id
from paceline.hardware.sources import output_of
from paceline.spec import Device

TIMEOUT_S = 20.0
QUERY = "index,name,memory.total,uuid,pci.bus_id,utilization.gpu,memory.used"


def list_gpus() -> list[Device]:
    """The GPUs that the driver lists, by PCI bus; none without a driver."""
    return parse_gpus(run(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"))


def run(*arguments: str) -> str:
    """What it prints; nothing where it is missing, fails or hangs."""
    return output_of(["nvidia-smi", *arguments], TIMEOUT_S) or ""


def parse_gpus(listing: str) -> list[Device]:
    """GPUs from the lines of QUERY: "index, name, memory in MiB, uuid, bus id, utilisation in %, memory in use in MiB".

    The first four must be there; what a driver cannot tell, such as [N/A], is left out.
    """
    gpus = []
    for line in listing.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < 4 or not cells[0].isdecimal() or not (cells[2].isdecimal() or cells[2].startswith("[")):
            continue
        index, name, memory, uuid, bus_id, utilization, used = (cells + [""] * 3)[:7]
        gpus.append(
            Device(
                "cuda",
                int(index),
                name,
                _number(memory) * 2**20,
                uuid,
                short_bus_id(bus_id),
                busy=busy(_number(utilization), _number(used) * 2**20) if used else "",
            )
        )
    return gpus


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
