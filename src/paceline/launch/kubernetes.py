"""Kubernetes: manifests for `kubectl apply`, with torch's agent in every pod; a pod is a node.

They are job.yaml, which needs nothing but Kubernetes, and trainjob.yaml for clusters with the Kubeflow Trainer, filled
in with values as JSON, which is YAML too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Literal

from paceline import env
from paceline.errors import LaunchError, shortened, shown

PORT = 29500
_MOST_NAME_CHARACTERS = 52
"""The limit of 63 characters of a host name less "-" and a pod's index (for a TrainJob also "-node-0-")."""


def manifest(
    kind: Literal["job", "trainjob"],
    name: str,
    program: Sequence[str],
    *,
    image: str,
    num_pods: int,
    workers_per_pod: int,
    use_gpus: bool,
    claim: str,
    mount: Path,
    run_dir: Path,
    cpus_per_worker: int = 1,
    memory_bytes: int | None = None,
) -> str:
    """The manifest of a run, as YAML; `program` is what would follow `python`. Raises `LaunchError` for a name that
    Kubernetes refuses, or a run folder outside of the volume.

    Args:
        claim: the PersistentVolumeClaim that all pods share; it is mounted at `mount`, and `run_dir` lies below it.
        memory_bytes: the memory of a pod, /dev/shm included; None: all memory of its node.
    """
    if not mount.is_absolute() or not run_dir.is_relative_to(mount) or ".." in run_dir.parts:
        raise LaunchError(
            f"The run folder {shortened(str(run_dir))} should lie below {mount}, where pods see their volume."
        )
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > _MOST_NAME_CHARACTERS:
        raise LaunchError(
            f"The name {shown(name)} is invalid in Kubernetes; take lower-case letters, digits and - inside, "
            f"{_MOST_NAME_CHARACTERS} at most."
        )
    # A worker that failed ends its pod, and with it the Job; the next Job resumes.
    command = ["python", "-m", "paceline.launch.agent"]
    if kind == "job":
        command += [f"--nnodes={num_pods}", f"--nproc-per-node={workers_per_pod}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={name}-0.{name}:{PORT}", f"--rdzv-id={name}"]
    variables = {
        "OMP_NUM_THREADS": str(cpus_per_worker),
        env.RUN_DIR: str(run_dir),
        env.OUTPUT: "all",
        **({} if use_gpus else {env.DEVICE: "cpu"}),
    }
    # Kubernetes copies limits to requests; cores are a request alone, to use idle ones.
    limits = {"nvidia.com/gpu": str(workers_per_pod)} if use_gpus else {}
    if memory_bytes is not None:
        limits["memory"] = f"{math.ceil(memory_bytes / (1 << 20))}Mi"
    requests = {"cpu": str(workers_per_pod * cpus_per_worker), **limits}
    # Kubernetes expands $(NAME) in commands and variables, and reads $$ as $.
    values = {
        "name": name,
        "port": PORT,
        "num_pods": num_pods,
        "workers_per_pod": workers_per_pod,
        "image": image,
        "command": [word.replace("$", "$$") for word in (*command, *program)],
        "mount": str(mount),
        "claim": claim,
        "variables": [{"name": key, "value": value.replace("$", "$$")} for key, value in variables.items()],
        "resources": {"requests": requests, **({"limits": limits} if limits else {})},
    }
    template = Template(Path(__file__).with_name(f"{kind}.yaml").read_text(encoding="utf-8"))
    return template.substitute({key: json.dumps(value, ensure_ascii=False) for key, value in values.items()})
