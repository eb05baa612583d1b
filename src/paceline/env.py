"""What a process finds around it: the environment variables that Paceline reads and sets, and the node's addresses.

A worker gets its rank from its launcher: Paceline's own, torchrun, Slurm, Open MPI or MPICH; a plain `python` is a
world of one.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.errors import LaunchError

_Value = TypeVar("_Value")

RUN_DIR = "PACELINE_RUN_DIR"
"""The run folder that the launcher made."""
LAUNCHED_AT = "PACELINE_LAUNCHED_AT"
"""When the launcher started this run, in seconds since the epoch."""
TRACE_DIR = "PACELINE_TRACE_DIR"
"""Where a run leaves records of its steps, for `paceline verify`."""
UNEVEN_DEAL = "PACELINE_UNEVEN_DEAL"
"""Set where `paceline verify` has some workers compute more virtual shards than others."""
MAX_STEPS = "PACELINE_MAX_STEPS"
DEVICE = "PACELINE_DEVICE"
HEARTBEAT = "PACELINE_HEARTBEAT"
CPUS = "PACELINE_CPUS"
CONTAINER = "PACELINE_CONTAINER"
STRATEGY = "PACELINE_STRATEGY"
DEBUG_COMM = "PACELINE_DEBUG_COMM"
RESTART = "TORCHELASTIC_RESTART_COUNT"
HANG_TIMEOUT = "PACELINE_HANG_TIMEOUT"
OUTPUT = "PACELINE_OUTPUT"
"""Whose output is shown: "rank0" or "all"."""
NODE = "PACELINE_NODE"
"""What the user calls this node."""
AGENT = "PACELINE_AGENT"
"""The process id of torch's agent on this node."""

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where Gloo, the RPC layer and NCCL look for the interface to use."""


@dataclass(frozen=True)
class WorkerFacts:
    """The rank of this process and the size of its run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    init_method: str = ""
    """The init method of the process group: "env://", "file:///path", "tcp://host:port"; empty in a world of one."""
    started_by: str = "python"


_OMPI = "OMPI_COMM_WORLD_"
_LAUNCHERS = (
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ()),
    ("mpirun", (f"{_OMPI}RANK", f"{_OMPI}SIZE", f"{_OMPI}LOCAL_RANK", f"{_OMPI}LOCAL_SIZE"), ("PMIX_NAMESPACE",)),
    # A login shell or an sbatch script has no number of tasks of a step: it is a world of one.
    ("srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    ("mpirun", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_JOBID",)),
)
"""What starts workers; its variables for the rank and the number of workers, of the run and of this node; and those
that tell its jobs apart."""


def worker_facts(environ: Mapping[str, str] | None = None) -> WorkerFacts:
    """Read this process's rank from the variables that its launcher set. Raises `LaunchError` where the variables
    contradict each other or are no numbers."""
    env = os.environ if environ is None else environ
    found = [row for row in _LAUNCHERS if row[1][0] in env and row[1][1] in env]
    if not found:
        return WorkerFacts()
    started_by, names, job_names = found[0]
    rank, world_size = _whole_number(env, names[0]), _whole_number(env, names[1])
    local_rank, local_world_size = _whole_number(env, names[2], rank), _whole_number(env, names[3], world_size)
    if started_by == "srun":
        counts, node = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", "1")), _whole_number(env, "SLURM_NODEID")
        if not 0 <= node < len(counts):
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE says nothing of node {node}, but only of {len(counts)}.")
        local_world_size = counts[node]
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"The environment says rank {rank} of {world_size} workers ({started_by}); check what started this process."
        )
    if started_by == "torchrun":
        return WorkerFacts(rank, world_size, local_rank, local_world_size, "env://", started_by)
    address = env.get("MASTER_ADDR") or _first_host(env)
    if address is None and world_size > local_world_size:
        raise LaunchError(
            f"{started_by} started {world_size} workers on several nodes, but no rendezvous is named; set "
            "MASTER_ADDR to an address of the first node (mpirun -x MASTER_ADDR=NODE …)."
        )
    # All workers of a job derive the same port if none was given.
    job = ".".join(env[name] for name in job_names if name in env) or str(os.getppid())
    port = env.get("MASTER_PORT") or str(20000 + zlib.crc32(job.encode()) % 12000)
    init_method = f"tcp://{address or '127.0.0.1'}:{port}"
    return WorkerFacts(rank, world_size, local_rank, local_world_size, init_method, started_by)


def _whole_number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        raise LaunchError(f"The environment variable {name} = {env[name]!r} should be a whole number.") from None


def tasks_per_node(text: str) -> list[int]:
    """The tasks of each node in Slurm's "2(x3),1": the first three nodes have two tasks, the fourth has one."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _first_host(env: Mapping[str, str]) -> str | None:
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
    single_node = env.get("SLURM_STEP_NUM_NODES", env.get("OMPI_MCA_orte_num_nodes", "1")) == "1"
    if not nodes or single_node:
        return None
    # "rack[0-1]_gpu[03-05,9],a" begins at rack0_gpu03: the first of every bracket in the first name.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group()) if first else None


def variable(name: str, value: object) -> dict[str, str]:
    """A variable that tells the workers of a run something; empty where `value` is None or an empty text."""
    return {} if value is None or value == "" else {name: str(value)}


def text(name: str) -> str:
    """A variable of this process; empty where it is not set."""
    return os.environ.get(name, "")


def value(name: str, kind: Callable[[str], _Value]) -> _Value | None:
    """A variable of this process, as what `kind` makes of it: `int`, `float`, `Path`; None where it is not set."""
    return kind(given) if (given := text(name)) else None


def python_path(folders: Sequence[Path]) -> dict[str, str]:
    """The variable that lets workers import modules from these folders first; empty without a folder."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), text("PYTHONPATH")]))} if folders else {}


def cpus(local_rank: int) -> set[int]:
    """The cores that a worker of this node is to stay on; empty: any."""
    shares = text(CPUS).split(";")
    return {int(cpu) for cpu in shares[local_rank].split(",") if cpu} if len(shares) > local_rank else set()


def cpu_name() -> str:
    """The processor of this node, such as "AMD EPYC 9654 96-Core Processor"."""
    cpuinfo = Path("/proc/cpuinfo")
    facts = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*: (.+)", facts, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def device_kind() -> str | None:
    """ "cpu" or "cuda" where the user forces one. Raises `LaunchError` for anything else."""
    kind = os.environ.get(DEVICE) or None
    if kind not in (None, "cpu", "cuda"):
        raise LaunchError(f"The environment variable {DEVICE} = {kind!r} should be 'cpu' or 'cuda'.")
    return kind


def visible_gpus() -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES; None where it is unset."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else [part.strip() for part in listed.split(",") if part.strip()]


def addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 or global IPv6 address) of this node's interfaces that are up; not of loopback."""
    import psutil  # 10 ms that hardly any command needs

    states = psutil.net_if_stats()
    return [
        (name, one.address)
        for name, known in psutil.net_if_addrs().items()
        for one in known
        if (one.family in (socket.AF_INET, socket.AF_INET6) and name in states and states[name].isup)
        and not one.address.startswith(("127.", "::1", "fe80:"))
    ]


def address_towards(host: str) -> str:
    """The address of this node from which it would send to `host`; nothing is sent, the kernel only chooses the route.
    Raises `OSError` where there is no way."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect(address)
        found: str = asking.getsockname()[0]
    return found
