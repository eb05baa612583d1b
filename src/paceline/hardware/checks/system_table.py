"""Checks of processor, versions, limits and storage: a table of what can be wrong, and how to fix it."""

from __future__ import annotations

from typing import Any

from paceline.hardware.checks.engine import Check, error, warning
from paceline.hardware.checks.node_facts import NodeFacts
from paceline.hardware.checks.storage_facts import StorageFacts
from paceline.hardware.checks.system_facts import ProcessLimit, SystemFacts
from paceline.spec import MachineLoad
from paceline.spec.machine_load import MOST_FOREIGN_SHARE
from paceline.words import number_of, size

MIN_OPEN_FILES = 4096
"""Loader processes pass tensors as open files, and each worker has sockets to its peers; 1024, a usual default, runs
out in long epochs ("Too many open files")."""
MIN_PROCESSES = 4096
"""Threads count too, and a worker of many cores starts hundreds."""
SELF_GOVERNED = ("intel_pstate", "amd-pstate-epp")
"""Processors that call "powersave" what goes up under load all the same."""


def _limit(name: str, node: NodeFacts) -> list[ProcessLimit]:
    """The limit of this name, if there is one."""
    limit = node.system.limits.get(name)
    return [] if limit is None or limit.soft is None else [limit]


def _limit_check(name: str, flag: str, enough: int, fine: str, what: str) -> Check[NodeFacts, ProcessLimit]:
    """The check of a limit that is a number; `fine` has a place for it."""

    def advice(limit: ProcessLimit) -> str:
        if limit.hard is None or limit.hard >= enough:
            return f"ulimit -{flag} {enough if limit.hard is None else limit.hard}"
        return (
            f"As root put '* - {name} 65536' into /etc/security/limits.conf and log in again; in a container: "
            f"--ulimit {name}=65536."
        )

    return Check[NodeFacts, ProcessLimit](
        f"ulimit {name}",
        lambda node: _limit(name, node),
        lambda node: fine.format(*(limit.soft for limit in _limit(name, node)), "any number of"),
        warning(lambda limit: (limit.soft or 0) < enough, what, advice),
    )


SYSTEM_CHECKS: tuple[Check[NodeFacts, Any], ...] = (
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
        lambda node: f"{number_of(node.system.threads_per_core, 'hardware thread')} a core.",
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
    Check[NodeFacts, MachineLoad](
        "cpu load",
        lambda node: None if node.system.load is None else [node.system.load],
        "The processors have nothing else to do.",
        warning(
            lambda load: load.stolen_cores > MOST_FOREIGN_SHARE * load.num_cores,
            "The host of this virtual machine gives the time of {stolen_cores:.1f} of {num_cores} cores to others; "
            "every step waits for the slowest worker.",
            "Use a machine whose cores are its own, or fewer workers.",
            hides_others=False,
        ),
        warning(
            lambda load: load.other_cores > MOST_FOREIGN_SHARE * load.num_cores,
            "Other programs use {other_cores:.1f} of {num_cores} cores: training is slower, and what is measured is "
            "wrong.",
            "See which they are: top -o %CPU",
        ),
    ),
    _limit_check(
        "nofile",
        "n",
        MIN_OPEN_FILES,
        "A process may open {} files.",
        f"A process may open only {{soft}} files; data loaders and sockets run out of them below {MIN_OPEN_FILES}.",
    ),
    _limit_check(
        "nproc",
        "u",
        MIN_PROCESSES,
        "A user may have {} processes and threads.",
        "A user may have only {soft} processes and threads; workers start hundreds each.",
    ),
    # RDMA cards pin the memory they read; without them nothing large is locked.
    Check[NodeFacts, ProcessLimit](
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


SHARED_MEMORY_BYTES = 32 * 2**20
"""The most bytes that sums through shared memory take, for all workers of a node."""
LOADER_BYTES = 2**30
"""Batches under way between loader processes and workers: tens of megabytes each, a few of every process."""
MIN_DISK_BYTES = 2**30
COMFORTABLE_DISK_BYTES = 10 * 2**30
"""A checkpoint with optimizer state takes 12 bytes a parameter: room for one of a billion parameters."""


def _shm_text(storage: StorageFacts) -> str:
    return f"/dev/shm has {size(storage.shm_free_bytes or 0)} free of {size(storage.shm_bytes or 0)}"


def _make_room_in_shm(storage: StorageFacts) -> str:
    if (storage.shm_bytes or 0) < LOADER_BYTES:
        return "sudo mount -o remount,size=8G /dev/shm; in a container: --shm-size=8g or --ipc=host"
    return "See what fills it: ls -lS /dev/shm"


def _folder_text(storage: StorageFacts) -> str:
    return f"{storage.folder} has {size(storage.free_bytes or 0)} free"


STORAGE_CHECKS: tuple[Check[NodeFacts, Any], ...] = (
    # Too little of it shows as "Bus error" in loaders; containers have 64 MB unless told otherwise.
    Check[NodeFacts, StorageFacts](
        "/dev/shm",
        lambda node: [node.storage],
        lambda node: f"/dev/shm has {size(node.storage.shm_free_bytes or 0)} free.",
        warning(
            lambda storage: storage.shm_free_bytes is None,
            "There is no /dev/shm: workers of this node will sum over sockets, and loader processes cannot pass "
            "batches.",
            "sudo mount -t tmpfs -o size=8G shm /dev/shm",
        ),
        error(
            lambda storage: (storage.shm_free_bytes or 0) < SHARED_MEMORY_BYTES,
            lambda storage: f"{_shm_text(storage)}; sums through shared memory take up to {size(SHARED_MEMORY_BYTES)}.",
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
            lambda storage: storage.obstacle != "",
            "{obstacle} is not a folder: no run can be written to {folder}.",
            "Name another folder with --out.",
        ),
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
