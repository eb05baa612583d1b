"""The checks of `paceline doctor` that look at values: functions that say what is wrong, or that nothing is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.words import listing, size

MIN_OPEN_FILES = 4096
"""Loader processes pass tensors as open files, and each worker has sockets to its peers; 1024, a usual default, runs
out in long epochs ("Too many open files")."""
UNLIMITED = -1
"""The value of `resource.RLIM_INFINITY`."""
LOADER_BYTES = 2**30
"""Batches under way between loader processes and workers: tens of megabytes each, a few of every process."""
MIN_DISK_BYTES = 2**30
COMFORTABLE_DISK_BYTES = 10 * 2**30
"""A checkpoint with optimizer state takes 12 bytes a parameter: room for one of a billion parameters."""
_INSIDE = ("lo", "docker", "virbr", "br-", "cni", "podman", "lxcbr")
"""How the names of networks inside of a node begin: loopback, and those of its containers and virtual machines."""
SLOW_LOOKUP_S = 1.0
"""A name server that does not answer costs 5 s a try (resolv.conf(5), timeout); one that does, milliseconds."""

Level = Literal["ok", "warning", "error"]
Row = tuple[object, Level, str, str]
"""What can be wrong: true if it is, the level, a sentence on it, and what to do."""


@dataclass(frozen=True)
class Finding:
    """One sentence on what is so, and one on what to do."""

    level: Level
    """ "error": training will fail or be wrong; "warning": it will be slow or may fail."""
    check: str
    """A short name that scripts can rely on, such as "ulimit nofile"."""
    what: str
    fix: str = ""
    """A command where there is one; empty where nothing needs doing."""
    node: str = ""
    """The node it was found on; empty: this one, or all of them together."""


@dataclass(frozen=True)
class TorchFacts:
    """What torch says of itself."""

    version: str = ""
    cuda: str = ""
    """The version of CUDA that it is built for; empty: it is built for CPU."""
    num_gpus: int = 0
    problem: str = ""
    """Why it cannot be loaded, or cannot use GPUs."""


@dataclass(frozen=True)
class NameLookup:
    """The address of a name, how long finding it took, and finding the name of the address."""

    name: str
    address: str = ""
    seconds: float = 0.0
    problem: str = ""
    """Why there is no address."""


def findings(check: str, fine: str, rows: Iterable[Row]) -> list[Finding]:
    """A finding for each row that is so, or the one that says that all is fine."""
    found = [Finding(level, check, what, fix) for is_so, level, what, fix in rows if is_so]
    return found or [Finding("ok", check, fine)]


def first_of_each(check: str, fine: str, *subjects: Iterable[Row]) -> list[Finding]:
    """What `findings` returns, but only the first row of each subject: those after it say less."""
    return findings(check, fine, (row for rows in subjects for row in [row for row in rows if row[0]][:1]))


def first_few(items: Sequence[str], most: int = 4) -> str:
    """ "a, b and c"; no more than `most` by name."""
    return listing(items if len(items) <= most else [*items[: most - 1], f"{len(items) - most + 1} more"])


def check_driver(num_gpus: int, num_on_bus: int, driver: str, problem: str) -> list[Finding]:
    """The driver knows every GPU of the bus; `problem` says why it could not be asked."""
    fine = f"{num_gpus} GPUs answer to the driver {driver}."
    unseen = f"{num_on_bus} NVIDIA GPUs are on the PCI bus, but the driver knows {num_gpus}: {problem or 'see dmesg'}."
    fix = "Install the NVIDIA driver, or look for NVRM in dmesg and reboot; start a container with --gpus all."
    none = "There is no NVIDIA GPU: workers compute on CPU."
    return findings("gpu driver", fine if num_gpus else none, [(num_on_bus > num_gpus, "error", unseen, fix)])


def check_cuda(torch: TorchFacts, num_gpus: int) -> list[Finding]:
    """Torch is built for CUDA, by a version that the driver runs, and can use the GPUs."""
    for_cpu = f"There are GPUs, but torch {torch.version} is built for CPU alone."
    install = "Install a torch built for CUDA; pytorch.org/get-started names the command."
    none = f"Torch {torch.version} for CUDA {torch.cuda} can use none of {num_gpus} GPUs: {torch.problem}."
    driver = "Update the driver, or install a torch for an older CUDA; NVSwitch systems need nvidia-fabricmanager."
    rows: list[Row] = [(not torch.cuda, "error", for_cpu, install), (torch.problem, "error", none, driver)]
    fine = f"Torch can use {torch.num_gpus} of {num_gpus} GPUs, by CUDA {torch.cuda}."
    return first_of_each("torch and GPUs", fine, rows)


def check_torch(torch: TorchFacts, python: str) -> list[Finding]:
    what, fix = f"Torch cannot be loaded by this Python: {torch.problem}.", "pip install torch"
    return findings("torch", f"torch {torch.version} on Python {python}.", [(not torch.version, "error", what, fix)])


def check_quota(num_cores: int, quota_cores: float) -> list[Finding]:
    """A container sees all cores of its node, and starts as many threads, whatever share of them it was given."""
    last = max(1, int(min(quota_cores, num_cores))) - 1
    what = f"The control group allows the time of {quota_cores:.3g} cores, but {num_cores} are visible: threads sleep."
    fix = f"Give the container more cores, or use fewer: taskset -c 0-{last} paceline …"
    row: Row = (quota_cores < num_cores, "warning", what, fix)
    return findings("cpu quota", f"All of {num_cores} cores may be used.", [row])


def check_open_files(soft: int, hard: int) -> list[Finding]:
    """What a process may open, and what it may ask for."""
    fix = f"ulimit -n {MIN_OPEN_FILES if hard == UNLIMITED else hard}"
    if UNLIMITED < hard < MIN_OPEN_FILES:
        fix = "As root put '* - nofile 65536' into /etc/security/limits.conf; in a container: --ulimit nofile=65536."
    what = f"A process may open only {soft} files; loaders and sockets run out of them below {MIN_OPEN_FILES}."
    fine = f"A process may open {'any number of' if soft == UNLIMITED else soft} files."
    return findings("ulimit nofile", fine, [(UNLIMITED < soft < MIN_OPEN_FILES, "warning", what, fix)])


def check_shared_memory(total_bytes: int, free_bytes: int) -> list[Finding]:
    """Loader processes pass batches through it; containers have 64 MB unless told otherwise."""
    larger = "sudo mount -o remount,size=8G /dev/shm; in a container: --shm-size=8g or --ipc=host"
    fix = larger if total_bytes < LOADER_BYTES else "See what fills it: ls -lS /dev/shm"
    room = f"/dev/shm has {size(free_bytes)} free of {size(total_bytes)}"
    none = "There is no /dev/shm, through which loader processes pass batches."
    little = f'{room}: data loader processes may end with "Bus error".'
    rows: list[Row] = [
        (not total_bytes, "warning", none, "sudo mount -t tmpfs -o size=8G shm /dev/shm"),
        (free_bytes < LOADER_BYTES, "warning", little, fix),
    ]
    return first_of_each("/dev/shm", f"/dev/shm has {size(free_bytes)} free.", rows)


def check_run_folder(folder: Path, free_bytes: int, obstacle: str, *, is_writable: bool) -> list[Finding]:
    """`obstacle` is a file with the name of the folder, or of one above it; empty: there is none."""
    other, more = "Name another folder with --out.", "Make room, or name another folder with --out."
    blocked = f"{obstacle} is not a folder: no run can be written to {folder}."
    room = f"{folder} has {size(free_bytes)} free"
    rows: list[Row] = [
        (obstacle, "error", blocked, other),
        (not is_writable, "error", f"Nothing can be written to {folder}.", other),
        (free_bytes < MIN_DISK_BYTES, "error", f"{room}: a checkpoint may not fit.", more),
        (free_bytes < COMFORTABLE_DISK_BYTES, "warning", f"{room}: enough for few checkpoints.", more),
    ]
    return first_of_each("run folder", f"{folder} can be written to and has room.", rows)


def check_own_name(own: NameLookup, address: str, *, has_peers: bool) -> list[Finding]:
    """Gloo and torch's rendezvous look the node's own name up; 127.0.1.1, which Debian puts into /etc/hosts, tells the
    other nodes to look for it on themselves. `address` is where they can reach it."""
    line = f"echo '{address or 'ADDRESS'} {own.name}' | sudo tee -a /etc/hosts"
    replace = f"In /etc/hosts replace {own.address} by {address or 'its address'} on the line of {own.name}."
    none = f"This node's own name {own.name} has no address: {own.problem}."
    inside = f"This node's own name {own.name} means {own.address}, where no other node can reach it."
    is_loopback = own.address.startswith("127.") or own.address == "::1"
    rows: list[Row] = [
        (not own.address, "error" if has_peers else "warning", none, line),
        (has_peers and is_loopback, "error", inside, replace),
        _slow(own, line),
    ]
    return first_of_each("own name", f"This node's own name {own.name} means {own.address}.", rows)


def check_route(peer: NameLookup, interface: str) -> list[Finding]:
    """Another node by its name, and the interface that leads to it; empty where none does."""
    name, address = peer.name, peer.address
    line = f"echo '{address or 'ADDRESS'} {name}' | sudo tee -a /etc/hosts"
    there = f"In /etc/hosts give {name} the address that other nodes reach it at."
    unknown = f"The name {name} has no address here: {peer.problem}."
    closed = f"No interface of this node leads to {name} ({address})."
    inside = f"The way to {name} ({address}) leads into {interface}, a network inside of this node."
    rows: list[Row] = [
        (not address, "error", unknown, f"Check its spelling, or {line}"),
        (interface == "lo", "error", f"The name {name} means this node itself here ({address}).", there),
        (not interface, "error", closed, f"See why: ip route get {address}"),
        (interface.startswith(_INSIDE), "error", inside, "Use its address in the network that all nodes share."),
        _slow(peer, line),
    ]
    return first_of_each(f"way to {name}", f"{interface} leads to {name} ({address}).", rows)


def _slow(lookup: NameLookup, fix: str) -> Row:
    what = f"Looking up {lookup.name} took {lookup.seconds:.1f} s: a name server does not answer, and runs wait."
    return (lookup.seconds > SLOW_LOOKUP_S, "warning", what, fix)
