"""The checks of one node: a table of what to look at, what can be wrong with it, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.hardware.checks.engine import Check, Finding, Problem, error, size_text, warning, words
from paceline.hardware.checks.gpu_facts import GpuFacts, GpusFacts
from paceline.hardware.checks.network_facts import TORCHRUN_PORT, Lookup, NetworkFacts, chosen_interfaces, is_bridge
from paceline.hardware.checks.node_facts import NodeFacts
from paceline.hardware.checks.pcie_facts import PcieFacts
from paceline.hardware.checks.storage_facts import StorageFacts
from paceline.hardware.checks.system_facts import Limit, SystemFacts

Checks = tuple[Check[NodeFacts, Any], ...]


def check_node(node: NodeFacts) -> list[Finding]:
    """All findings that need the facts of one node alone."""
    tables = (*GPU_CHECKS, *PCIE_CHECKS, *SYSTEM_CHECKS, *STORAGE_CHECKS, OWN_NAME_CHECK)
    return [
        *(finding for check in tables for finding in check.findings(node)),
        *(finding for peer in _peers(node) for finding in PEER_NAME_CHECK.findings(peer)),
        *(finding for check in NETWORK_CHECKS for finding in check.findings(node)),
    ]


# --- GPUs ---

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


def _throttling(gpu: GpuFacts) -> list[str]:
    return [reason for bit, reason in THROTTLING.items() if gpu.throttle_reasons & bit]


RESET = "Take its programs down and reset it: sudo nvidia-smi --gpu-reset -i {index}"

# Errors of GPU memory are judged by NVIDIA's "GPU Memory Error Management" and "Dynamic Page Retirement".
GPU_CHECKS: Checks = (
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
            lambda found: not found.are_all,
            "The GPUs {pairs} cannot reach each other's memory: {why}; what they send goes through the node's memory.",
            "Choose devices that can: paceline topo --pick 2",
        ),
        warning(
            lambda found: found.are_all,
            "The GPUs {pairs} cannot reach each other's memory: {why}; what they send goes through the node's memory.",
            "Nothing to set where the GPU model has no such ability; else update driver and BIOS.",
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
            _throttling,
            lambda gpu: f"GPU {gpu.index} runs slower than it could: {words(_throttling(gpu))}.",
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


PCIE_CHECKS: Checks = (
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


# --- processor, limits and versions ---

MIN_OPEN_FILES = 4096
"""Loader processes pass tensors as open files, and each worker has sockets to its peers; 1024, a usual default, runs
out in long epochs ("Too many open files")."""
MIN_PROCESSES = 4096
"""Threads count too, and a worker of many cores starts hundreds."""
SELF_GOVERNED = ("intel_pstate", "amd-pstate-epp")
"""Processors that call "powersave" what goes up under load all the same."""


def _limit(name: str, node: NodeFacts) -> list[Limit]:
    """The limit of this name, if there is one."""
    limit = node.system.limits.get(name)
    return [] if limit is None or limit.soft is None else [limit]


def _number(name: str, node: NodeFacts) -> str:
    return next((str(limit.soft) for limit in _limit(name, node)), "any number of")


def _raise_limit(flag: str, name: str, limit: Limit, enough: int) -> str:
    if limit.hard is None or limit.hard >= enough:
        return f"ulimit -{flag} {enough if limit.hard is None else limit.hard}"
    return (
        f"As root put '* - {name} 65536' into /etc/security/limits.conf and log in again; in a container: "
        f"--ulimit {name}=65536."
    )


SYSTEM_CHECKS: Checks = (
    Check[NodeFacts, SystemFacts](
        "torch",
        lambda node: [node.system],
        lambda node: (
            f"torch {node.system.versions['torch']} on Python "
            f"{node.system.versions.get('python', 'of unknown version')}."
        ),
        error(
            lambda system: "torch" not in system.versions,
            "Torch is not installed for this Python.",
            "pip install torch",
        ),
    ),
    # A container sees all cores of its node, and starts as many threads, whatever share of them it was given.
    Check[NodeFacts, SystemFacts](
        "cpu quota",
        lambda node: [node.system],
        "All of {system.num_cores} cores may be used.",
        warning(
            lambda system: system.quota_cores is not None and system.quota_cores < system.num_cores,
            "The control group allows the time of {quota_cores:.3g} cores, but {num_cores} are visible: threads beyond "
            "that are put to sleep in the middle of a step.",
            lambda system: (
                f"Give the container more cores, or use no more than {system.quota_workers}: taskset -c "
                f"0-{system.quota_workers - 1} paceline …"
            ),
        ),
    ),
    Check[NodeFacts, SystemFacts](
        "hyper-threads",
        lambda node: [] if node.gpus.gpus else [node.system],
        lambda node: (
            f"{node.system.threads_per_core} hardware thread{'s' * (node.system.threads_per_core > 1)} a core."
        ),
        warning(
            lambda system: 1 < system.threads_per_core < system.num_cores,
            "{threads_per_core} of the {num_cores} processors share a core each, so CPU workers beyond {real_cores} "
            "gain little.",
            "Train with at most {real_cores} workers: paceline train -n {real_cores} …",
        ),
    ),
    Check[NodeFacts, SystemFacts](
        "cpu governor",
        lambda node: [node.system],
        lambda node: (
            f"The frequency governor is {node.system.governor or 'not to be seen, as in most virtual machines'}."
        ),
        warning(
            lambda cpu: cpu.governor in ("powersave", "conservative") and cpu.scaling_driver not in SELF_GOVERNED,
            "The frequency governor is {governor}: cores stay slow under load.",
            "sudo cpupower frequency-set -g performance",
        ),
    ),
    Check[NodeFacts, Limit](
        "ulimit nofile",
        lambda node: _limit("nofile", node),
        lambda node: f"A process may open {_number('nofile', node)} files.",
        warning(
            lambda limit: (limit.soft or 0) < MIN_OPEN_FILES,
            f"A process may open only {{soft}} files; data loaders and sockets run out of them below {MIN_OPEN_FILES}.",
            lambda limit: _raise_limit("n", "nofile", limit, MIN_OPEN_FILES),
        ),
    ),
    Check[NodeFacts, Limit](
        "ulimit nproc",
        lambda node: _limit("nproc", node),
        lambda node: f"A user may have {_number('nproc', node)} processes and threads.",
        warning(
            lambda limit: (limit.soft or 0) < MIN_PROCESSES,
            "A user may have only {soft} processes and threads; workers start hundreds each.",
            lambda limit: _raise_limit("u", "nproc", limit, MIN_PROCESSES),
        ),
    ),
    # RDMA cards pin the memory they read; without them nothing large is locked.
    Check[NodeFacts, Limit](
        "ulimit memlock",
        lambda node: _limit("memlock", node) if node.network.rdma_ports else [],
        "Enough memory may be locked for what this node has.",
        error(
            lambda _: True,
            lambda limit: (
                f"Only {(limit.soft or 0) // 1024} KiB may be locked, but this node has RDMA cards, which "
                'lock what they send: NCCL fails with "ibv_reg_mr".'
            ),
            lambda limit: (
                "ulimit -l unlimited"
                if limit.hard is None
                else "As root put '* - memlock unlimited' into /etc/security/limits.conf and log in again; in a "
                "container: --ulimit memlock=-1."
            ),
        ),
    ),
)


# --- storage ---

SHARED_MEMORY_BYTES = 32 * 2**20
"""What sums through shared memory take at most, for all workers of a node."""
LOADER_BYTES = 2**30
"""Batches under way between loader processes and workers: tens of megabytes each, a few of every process."""
MIN_DISK_BYTES = 2**30
COMFORTABLE_DISK_BYTES = 10 * 2**30
"""A checkpoint with optimizer state takes 12 bytes a parameter: room for one of a billion parameters."""


def _shm_text(storage: StorageFacts) -> str:
    return f"/dev/shm has {size_text(storage.shm_free_bytes or 0)} free of {size_text(storage.shm_bytes or 0)}"


def _make_room_in_shm(storage: StorageFacts) -> str:
    if (storage.shm_bytes or 0) < LOADER_BYTES:
        return "sudo mount -o remount,size=8G /dev/shm; in a container: --shm-size=8g or --ipc=host"
    return "See what fills it: ls -lS /dev/shm"


def _folder_text(storage: StorageFacts) -> str:
    return f"{storage.folder} has {size_text(storage.free_bytes or 0)} free"


STORAGE_CHECKS: Checks = (
    # Too little of it shows as "Bus error" in loaders; containers have 64 MB unless told otherwise.
    Check[NodeFacts, StorageFacts](
        "/dev/shm",
        lambda node: [node.storage],
        lambda node: f"/dev/shm has {size_text(node.storage.shm_free_bytes or 0)} free.",
        warning(
            lambda storage: storage.shm_free_bytes is None,
            "There is no /dev/shm: workers of this node will sum over sockets, and loader processes cannot pass "
            "batches.",
            "sudo mount -t tmpfs -o size=8G shm /dev/shm",
        ),
        error(
            lambda storage: (storage.shm_free_bytes or 0) < SHARED_MEMORY_BYTES,
            lambda storage: (
                f"{_shm_text(storage)}; sums through shared memory take up to {size_text(SHARED_MEMORY_BYTES)}."
            ),
            _make_room_in_shm,
        ),
        warning(
            lambda storage: (storage.shm_free_bytes or 0) < LOADER_BYTES,
            lambda storage: (
                f'{_shm_text(storage)}: enough for sums, but data loader processes may end with "Bus error".'
            ),
            _make_room_in_shm,
        ),
    ),
    Check[NodeFacts, StorageFacts](
        "run folder",
        lambda node: [node.storage],
        "{storage.folder} can be written to and has room.",
        error(
            lambda storage: not storage.is_writable,
            "Nothing can be written to {folder}.",
            "Name another folder with --out.",
        ),
        error(
            lambda storage: storage.free_bytes is not None and storage.free_bytes < MIN_DISK_BYTES,
            lambda storage: f"{_folder_text(storage)}: a checkpoint may not fit.",
            "Make room, or name another folder with --out.",
        ),
        warning(
            lambda storage: storage.free_bytes is not None and storage.free_bytes < COMFORTABLE_DISK_BYTES,
            lambda storage: f"{_folder_text(storage)}: enough for few checkpoints.",
            "Make room, or name another folder with --out.",
        ),
    ),
)


# --- network ---

SLOW_LOOKUP_S = 1.0
"""A name server that does not answer costs 5 s a try (resolv.conf(5), timeout); one that does, milliseconds."""
MIN_PORTS = 1000
"""Every pair of workers holds a few connections."""


@dataclass(frozen=True)
class _NodeName:
    """A node's name, its own or another's, and what this node makes of it."""

    lookup: Lookup
    hosts_address: str
    """To be put into /etc/hosts; empty where none is known."""
    has_peers: bool = False
    interface: str = ""
    """That leads to the address."""

    @property
    def name(self) -> str:
        return self.lookup.name

    @property
    def address(self) -> str:
        return next(iter(self.lookup.addresses), "")

    @property
    def hosts_line(self) -> str:
        return f"echo '{self.hosts_address or 'ADDRESS'} {self.name}' | sudo tee -a /etc/hosts"


@dataclass(frozen=True)
class _Variable:
    """An environment variable that names interfaces, which Gloo and NCCL then use whatever they are."""

    name: str
    value: str
    chosen: list[str]
    """The interfaces of this node that it names and that are up."""
    up: str
    """All that are up."""
    has_peers: bool


def _own_name(node: NodeFacts) -> list[_NodeName] | None:
    up = [interface for interface in node.network.interfaces if interface.is_up]
    address = next((address for interface in up for address in interface.addresses), "")
    own = node.network.own_name
    return None if own is None else [_NodeName(own, address, node.has_peers)]


def _peers(node: NodeFacts) -> list[_NodeName]:
    network = node.network
    return [
        _NodeName(peer, next(iter(peer.addresses), ""), interface=network.routes.get(peer.name, ""))
        for peer in network.peers
    ]


def _variables(node: NodeFacts) -> list[_Variable]:
    up = [interface.name for interface in node.network.interfaces if interface.is_up]
    return [
        _Variable(name, value, chosen_interfaces(name, value, up), words(up, 8), node.has_peers)
        for name, value in node.network.variables.items()
    ]


SLOW = "a name server does not answer, and every connection of a run waits for it."
_SLOW_LOOKUPS: tuple[Problem[_NodeName], ...] = (
    warning(
        lambda found: found.lookup.forward_s > SLOW_LOOKUP_S,
        "It took {lookup.forward_s:.1f} s to find the address of {name}: " + SLOW,
        "{hosts_line}",
        hides_others=False,
    ),
    warning(
        lambda found: found.lookup.reverse_s > SLOW_LOOKUP_S,
        "It took {lookup.reverse_s:.1f} s to find the name of {address}: " + SLOW,
        "{hosts_line}",
        hides_others=False,
    ),
)

# Gloo and Python's rendezvous look the node's own name up; 127.0.1.1, which Debian puts into /etc/hosts, then tells
# the other nodes to look for it on themselves.
OWN_NAME_CHECK = Check[NodeFacts, _NodeName](
    "own name",
    _own_name,
    "This node's own name {network.own_name.name} means {network.own_name.addresses[0]}, found at once both ways.",
    error(
        lambda own: not own.address and own.has_peers,
        "This node's own name {name} has no address: {lookup.problem}.",
        "{hosts_line}",
    ),
    warning(
        lambda own: not own.address,
        "This node's own name {name} has no address: {lookup.problem}.",
        "{hosts_line}",
    ),
    error(
        lambda own: own.has_peers and own.lookup.is_loopback,
        "This node's own name {name} means {address}, where no other node can reach it.",
        lambda own: (
            f"In /etc/hosts replace {own.address} by {own.hosts_address or 'its address'} on the line of {own.name}."
        ),
    ),
    *_SLOW_LOOKUPS,
)

PEER_NAME_CHECK = Check[_NodeName, _NodeName](
    "way to {name}",
    lambda peer: [peer],
    "{interface} leads to {name} ({address}).",
    error(
        lambda peer: not peer.address,
        "The name {name} has no address here: {lookup.problem}.",
        "Check its spelling, or: {hosts_line}",
    ),
    error(
        lambda peer: peer.interface == "lo",
        "The name {name} means this node itself here ({address}).",
        "In /etc/hosts give {name} the address that other nodes reach it at.",
    ),
    *_SLOW_LOOKUPS,
    error(
        lambda peer: not peer.interface,
        "No interface of this node leads to {name} ({address}).",
        "See why: ip route get {address}",
    ),
    error(
        lambda peer: is_bridge(peer.interface),
        "The way to {name} ({address}) leads into {interface}, a network of containers on this node.",
        "Use an address of the node in the network that all nodes share.",
    ),
)
"""The check of another node's name and of the way there, once for each of them."""

NETWORK_CHECKS: Checks = (
    Check[NodeFacts, _Variable](
        "interface",
        _variables,
        lambda node: (
            f"{' and '.join(node.network.variables)} name an interface that is up."
            if node.network.variables
            else "No variable forces an interface."
        ),
        error(
            lambda variable: not variable.chosen,
            "{name}={value} names no interface of this node that is up; there are {up}.",
            "unset {name}, or name one of them",
        ),
        error(
            lambda variable: variable.has_peers and all(name == "lo" or is_bridge(name) for name in variable.chosen),
            "{name}={value} sends workers to {chosen[0]}, where no other node is.",
            "unset {name}",
        ),
        named="{name}",
    ),
    Check[NodeFacts, NetworkFacts](
        "RDMA ports",
        lambda node: [node.network],
        lambda node: (
            f"All {len(node.network.rdma_ports)} RDMA ports are active."
            if node.network.rdma_ports
            else "There are no RDMA cards: nodes talk over sockets."
        ),
        warning(
            lambda network: network.idle_rdma_ports,
            lambda network: (
                f"{len(network.idle_rdma_ports)} of {len(network.rdma_ports)} RDMA ports carry nothing: "
                f"{words(network.idle_rdma_ports)}."
            ),
            lambda network: (
                "Check cable and switch (ibstat), or leave them out: NCCL_IB_HCA=^"
                + ",".join(port.split("/")[0] for port in network.idle_rdma_ports)
            ),
        ),
    ),
    Check[NodeFacts, NetworkFacts](
        "free ports",
        lambda node: [node.network],
        f"There are ports to be had, {TORCHRUN_PORT} among them.",
        warning(
            lambda network: network.num_ports is not None and network.num_ports < MIN_PORTS,
            "The system gives out only {num_ports} ports; workers hold a few for every pair.",
            "sudo sysctl net.ipv4.ip_local_port_range='32768 60999'",
            hides_others=False,
        ),
        warning(
            lambda network: not network.is_torchrun_port_free,
            f"Port {TORCHRUN_PORT}, which torchrun takes unless told otherwise, is in use.",
            "Start with paceline launch, which binds a free one, or give torchrun --standalone.",
        ),
    ),
)
