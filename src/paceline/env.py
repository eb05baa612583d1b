"""The one module that reads and writes environment variables.

A worker learns who it is from whoever started it: Paceline's own launcher, torchrun, Slurm, Open MPI, MPICH, or
nobody (a plain `python`, which is a world of one).
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError

RENDEZVOUS = "PACELINE_RENDEZVOUS"
RUN_DIR = "PACELINE_RUN_DIR"
LAUNCHED_AT = "PACELINE_LAUNCHED_AT"
DATA_DIR = "PACELINE_DATA"
TRACE_DIR = "PACELINE_TRACE_DIR"
MAX_STEPS = "PACELINE_MAX_STEPS"
DEVICE = "PACELINE_DEVICE"


@dataclass(frozen=True)
class WorkerFacts:
    """Who this process is among the workers of its run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    init_method: str = ""
    """How the process group meets: "env://", "file:///path", "tcp://host:port"; empty in a world of one."""
    started_by: str = "python"


def worker_facts(environ: Mapping[str, str] | None = None) -> WorkerFacts:
    """Read this process's place from the variables its launcher set.

    Raises:
        LaunchError: the variables contradict each other or are no numbers.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rendezvous = env.get(RENDEZVOUS, "")
        return _checked(
            rank=_number(env, "RANK"),
            world_size=_number(env, "WORLD_SIZE"),
            local_rank=_number(env, "LOCAL_RANK", _number(env, "RANK")),
            local_world_size=_number(env, "LOCAL_WORLD_SIZE", _number(env, "WORLD_SIZE")),
            init_method=rendezvous or "env://",
            started_by="paceline" if rendezvous else "torchrun",
        )
    if "OMPI_COMM_WORLD_RANK" in env:
        return _checked(
            rank=_number(env, "OMPI_COMM_WORLD_RANK"),
            world_size=_number(env, "OMPI_COMM_WORLD_SIZE"),
            local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
            local_world_size=_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE"),
            init_method=_tcp(env, job_id=env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", ""))),
            started_by="mpirun",
        )
    # A step of one task is what a login shell or an sbatch script sees of itself: a world of one all the same.
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        return _checked(
            rank=_number(env, "SLURM_PROCID"),
            world_size=_number(env, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(env, "SLURM_LOCALID"),
            local_world_size=_first_number(env.get("SLURM_STEP_TASKS_PER_NODE", "1")),
            init_method=_tcp(env, job_id=f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"),
            started_by="srun",
        )
    if "PMI_RANK" in env and "PMI_SIZE" in env:
        return _checked(
            rank=_number(env, "PMI_RANK"),
            world_size=_number(env, "PMI_SIZE"),
            local_rank=_number(env, "MPI_LOCALRANKID", _number(env, "PMI_RANK")),
            local_world_size=_number(env, "MPI_LOCALNRANKS", _number(env, "PMI_SIZE")),
            init_method=_tcp(env, job_id=env.get("PMI_JOBID", str(os.getppid()))),
            started_by="mpirun",
        )
    return WorkerFacts()


def _checked(
    *, rank: int, world_size: int, local_rank: int, local_world_size: int, init_method: str, started_by: str
) -> WorkerFacts:
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"The environment says rank {rank} of {world_size} workers ({started_by}); a rank lies in "
            "0 … world size - 1: check what started this process."
        )
    if init_method.startswith("tcp://127.0.0.1:") and world_size > local_world_size:
        raise LaunchError(
            f"{started_by} started {world_size} workers on several nodes, but nothing says where they meet; set "
            "MASTER_ADDR to an address of the first node."
        )
    return WorkerFacts(rank, world_size, local_rank, local_world_size, init_method, started_by)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise LaunchError(f"The environment variable {name} is missing beside the other rank variables.")
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"The environment variable {name} = {text!r} should be a whole number.") from None


def _first_number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found.group()) if found else 1


def _tcp(env: Mapping[str, str], job_id: str) -> str:
    """A meeting point all workers of one job derive alike when nobody named one."""
    address = env.get("MASTER_ADDR") or _first_host(env) or "127.0.0.1"
    port = env.get("MASTER_PORT") or str(20000 + zlib.crc32(job_id.encode()) % 12000)
    return f"tcp://{address}:{port}"


def _first_host(env: Mapping[str, str]) -> str | None:
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
    single_node = env.get("SLURM_STEP_NUM_NODES", env.get("OMPI_MCA_orte_num_nodes", "1")) == "1"
    if not nodes or single_node:
        return None
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)  # "gpu[03-05,9]" begins at gpu03
    return first.group(1) + (first.group(2) or "") if first else None


def worker_environ(facts: WorkerFacts, *, run_dir: Path, threads_per_worker: int, launched_at: float) -> dict[str, str]:
    """The whole environment of one worker that this machine's launcher starts."""
    env = dict(os.environ)
    env.update(
        RANK=str(facts.rank),
        WORLD_SIZE=str(facts.world_size),
        LOCAL_RANK=str(facts.local_rank),
        LOCAL_WORLD_SIZE=str(facts.local_world_size),
        OMP_NUM_THREADS=str(threads_per_worker),
        MKL_NUM_THREADS=str(threads_per_worker),
        PYTHONUNBUFFERED="1",
    )
    env[RENDEZVOUS] = facts.init_method
    env[RUN_DIR] = str(run_dir)
    env[LAUNCHED_AT] = repr(launched_at)
    # A run on one machine has no business on any other interface.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.setdefault("TP_SOCKET_IFNAME", "lo")
    return env


def launched_at() -> float:
    """When the launcher started this run, in seconds since the epoch; now, when nobody said."""
    text = os.environ.get(LAUNCHED_AT)
    return float(text) if text else time.time()


def run_dir() -> Path | None:
    """The run folder the launcher made, if one did."""
    text = os.environ.get(RUN_DIR)
    return Path(text) if text else None


def data_dir() -> Path:
    """Where downloads and decoded caches live: PACELINE_DATA, else the user's cache directory."""
    text = os.environ.get(DATA_DIR)
    if text:
        return Path(text).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def trace_dir() -> Path | None:
    """Where `paceline verify` asks a run to leave its per-step fingerprints."""
    text = os.environ.get(TRACE_DIR)
    return Path(text) if text else None


def max_steps() -> int | None:
    """A limit on steps set from outside the script, by `paceline verify`."""
    text = os.environ.get(MAX_STEPS)
    return int(text) if text else None


def device_kind() -> str | None:
    """ "cpu" or "cuda" where the user forces one. Raises `LaunchError` for anything else."""
    kind = os.environ.get(DEVICE) or None
    if kind not in (None, "cpu", "cuda"):
        raise LaunchError(f"The environment variable {DEVICE} = {kind!r} should be 'cpu' or 'cuda'.")
    return kind


def thread_limit() -> int | None:
    """Threads per worker that the launcher settled on."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() else None


def deterministic_cuda() -> None:
    """Make cuBLAS repeatable; it reads this when its first handle is made."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def visible_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES lists; None where it is unset."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def trace_request(directory: Path, steps: int) -> dict[str, str]:
    """The variables that make a run leave fingerprints of its first `steps` steps in `directory`."""
    return {TRACE_DIR: str(directory), MAX_STEPS: str(steps)}
