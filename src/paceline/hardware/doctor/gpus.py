"""The checks of NVIDIA GPUs and of what is between them, which ask the driver."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from paceline.hardware.doctor.checks import Finding, Row, findings, first_few, first_of_each
from paceline.hardware.nvml import Nvml, busy, throttling

Handles = Mapping[int, Any]
"""The GPUs that NVML opened, by index."""

UNCORRECTED, VOLATILE, PROHIBITED, READ = 1, 0, 2, 0
"""Values of nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlComputeMode_t and nvmlGpuP2PCapsIndex_t."""
HELD_CLOCKS = 0x02
"""A bit of nvmlClocksThrottleReasons*: the clocks are held by a setting."""


def check_peer_access(nvml: Nvml, gpus: Handles) -> list[Finding]:
    """Pairs of GPUs copy to each other directly; nothing where the driver does not tell."""
    pairs = {f"{a}-{b}": nvml.ask("nvmlDeviceGetP2PStatus", gpus[a], gpus[b], READ) for a, b in combinations(gpus, 2)}
    if not pairs or None in pairs.values():
        return []
    cut = [pair for pair, status in pairs.items() if status]
    what = f"The GPUs {first_few(cut)} reach each other through the node's memory only (nvidia-smi topo -p2p r: why)."
    fix = "Choose devices that can: paceline topo --pick 2; if none can, nothing is to be set."
    fine = f"All {len(pairs)} pairs of GPUs reach each other's memory."
    return findings("peer-to-peer", fine, [(cut, "warning", what, fix)])


def check_memory(nvml: Nvml, gpus: Handles) -> list[Finding]:
    """Errors of GPU memory, as NVIDIA's "GPU Memory Error Management" and "Dynamic Page Retirement" judge them."""

    def problems(i: int, gpu: Any) -> list[Row]:
        _, _, is_row_pending, is_repair_failed = nvml.ask("nvmlDeviceGetRemappedRows", gpu) or (0, 0, 0, 0)
        is_pending = is_row_pending or nvml.ask("nvmlDeviceGetRetiredPagesPendingStatus", gpu)
        errors = nvml.ask("nvmlDeviceGetTotalEccErrors", gpu, UNCORRECTED, VOLATILE)
        ecc = nvml.ask("nvmlDeviceGetEccMode", gpu)
        uncorrected = f"GPU {i} had {errors} uncorrectable memory errors since the driver was loaded."
        off = f"GPU {i} could correct memory errors, but does not: a flipped bit changes a result in silence."
        reset = f"Take its programs down and reset it: sudo nvidia-smi --gpu-reset -i {i}"
        replace = f"Have GPU {i} replaced."
        return [
            (is_repair_failed, "error", f"GPU {i} has no spare memory row left for a broken one.", replace),
            (is_pending, "error", f"GPU {i} has broken memory that its next reset takes out of use.", reset),
            (errors, "error", uncorrected, f"{reset}; if they come back, have it replaced."),
            (ecc and not ecc[0], "warning", off, f"sudo nvidia-smi -i {i} -e 1, then reboot"),
        ]

    return first_of_each(
        "gpu memory", "No GPU has memory errors that matter.", *(problems(*gpu) for gpu in gpus.items())
    )


def check_speed(nvml: Nvml, gpus: Handles) -> list[Finding]:
    rows: list[Row] = []
    for i, gpu in gpus.items():
        slowed = throttling(nvml, gpu)
        is_held = (nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu) or 0) & HELD_CLOCKS
        watts, usual_watts = (
            (nvml.ask(f"nvmlDeviceGetPowerManagement{limit}", gpu) or 0) / 1000 for limit in ("Limit", "DefaultLimit")
        )
        width, most = (nvml.ask(f"nvmlDeviceGet{end}PcieLinkWidth", gpu) or 0 for end in ("Curr", "Max"))
        cooling = "Look at its cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
        capped = f"GPU {i} may take {watts:g} W, less than its usual {usual_watts:g} W."
        slot = "Put it into a full-width slot, or seat card and riser again."
        rows += [
            (slowed, "warning", f"GPU {i} runs slower than it could: {first_few(slowed)}.", cooling),
            (is_held, "warning", f"The clocks of GPU {i} are held down by a setting.", f"sudo nvidia-smi -i {i} -rac"),
            (0 < watts < usual_watts, "warning", capped, f"sudo nvidia-smi -i {i} -pl {usual_watts:g}"),
            (0 < width < most, "warning", f"GPU {i} has {width} of its {most} PCIe lanes.", slot),
        ]
    return findings("gpu speed", "No GPU is slowed down.", rows)


def check_modes(nvml: Nvml, gpus: Handles) -> list[Finding]:
    """Every GPU is free and lets programs in."""
    rows: list[Row] = []
    for i, gpu in gpus.items():
        is_closed = nvml.ask("nvmlDeviceGetComputeMode", gpu) == PROHIBITED
        is_forgotten = nvml.ask("nvmlDeviceGetPersistenceMode", gpu) == 0
        is_split = (nvml.ask("nvmlDeviceGetMigMode", gpu) or (0,))[0]
        use = busy(nvml, gpu)
        closed = f"The compute mode of GPU {i} lets no program in."
        split = f"GPU {i} is in MIG mode: its parts cannot reach each other's memory, and a worker gets one part."
        forgotten = f"The driver forgets GPU {i} when nobody uses it, so every start waits for it."
        rows += [
            (is_closed, "error", closed, f"sudo nvidia-smi -i {i} -c DEFAULT"),
            (is_split, "warning", split, f"For training on whole GPUs: sudo nvidia-smi -i {i} -mig 0"),
            (is_forgotten, "warning", forgotten, f"sudo nvidia-smi -i {i} -pm 1"),
            (use, "warning", f"GPU {i} is in use: {use}.", "See by whom: nvidia-smi"),
        ]
    return findings("gpu modes", "Every GPU is open to programs.", rows)
