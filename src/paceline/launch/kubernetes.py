"""Kubernetes: manifests for `kubectl apply`, with torch's agent in every pod.

`job_manifest` needs nothing but Kubernetes: an Indexed Job, a pod a node, and a Service by which pods find the first.
`train_job_manifest` is for clusters with the Kubeflow Trainer (2.2 or later), which brings both and tells torchrun the
rest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import env
from paceline.errors import LaunchError, shortened, shown
from paceline.spec.job import MOST_WORKERS

PORT = 29500

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MOST_NAME_CHARACTERS = 52
"""The limit of 63 characters of a host name less "-" and a pod's index (for a TrainJob also "-node-0-")."""
_SHM_BYTES = 8 << 30
"""The size of /dev/shm, used by workers and data loaders; it counts as memory of the pod."""
_POD_SECURITY = {"seccompProfile": {"type": "RuntimeDefault"}}
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True)
class Pods:
    """The settings of every pod of a run; a pod is a node."""

    image: str
    """The image that Kubernetes pulls; with @sha256:… it is the same on all nodes."""
    num_pods: int
    workers_per_pod: int
    use_gpus: bool
    claim: str
    """The PersistentVolumeClaim that all pods share; it is mounted at `mount`."""
    mount: Path
    """The mount point of the volume; run folder and data lie below it."""
    run_dir: Path
    cpus_per_worker: int = 1
    memory_bytes: int | None = None
    """The memory of a pod; None: all memory of its node."""

    @property
    def mounts(self) -> list[dict[str, str]]:
        return [{"name": "runs", "mountPath": str(self.mount)}, {"name": "shm", "mountPath": "/dev/shm"}]

    @property
    def volumes(self) -> list[dict[str, Any]]:
        return [
            {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _mebibytes(_SHM_BYTES)}},
        ]

    @property
    def variables(self) -> list[dict[str, str]]:
        variables = {
            # Workers that torch's agent restarts would read addresses of dead peers from the store of the agents.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": str(self.cpus_per_worker),
            "PYTHONUNBUFFERED": "1",
            env.RUN_DIR: str(self.run_dir),
            env.OUTPUT: "all",
            **({} if self.use_gpus else {env.DEVICE: "cpu"}),
        }
        return [{"name": name, "value": _literal(value)} for name, value in variables.items()]

    @property
    def resources(self) -> dict[str, dict[str, str]]:
        """Limits, which Kubernetes copies to requests; cores as a request, to use idle ones."""
        limits = {
            **({"nvidia.com/gpu": str(self.workers_per_pod)} if self.use_gpus else {}),
            **({"memory": _mebibytes(self.memory_bytes)} if self.memory_bytes is not None else {}),
        }
        requests = {"cpu": str(self.workers_per_pod * self.cpus_per_worker), **limits}
        return {"requests": requests, **({"limits": limits} if limits else {})}


def job_manifest(name: str, program: Sequence[str], pods: Pods) -> str:
    """A Service and an Indexed Job, as YAML; `program` is what would follow `python`.

    A pod that fails ends the Job: the workers of the others could not go on without its own.

    Raises:
        LaunchError: a name that Kubernetes refuses, a run folder outside of the volume.
    """
    _check(name, program, pods)
    rendezvous = {"name": "rendezvous", "port": PORT}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # agents meet before any pod is ready
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [rendezvous],
    }
    size = [f"--nnodes={pods.num_pods}", f"--nproc-per-node={pods.workers_per_pod}"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={name}-0.{name}:{PORT}", f"--rdzv-id={name}"]
    container = {
        "name": "workers",
        "image": pods.image,
        "command": _agent([*size, *meeting], program),
        "workingDir": str(pods.mount),
        "env": pods.variables,
        "ports": [{"containerPort": PORT}],
        "resources": pods.resources,
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": pods.mounts,
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _POD_SECURITY,
        "containers": [container],
        "volumes": pods.volumes,
    }
    job = {
        "completionMode": "Indexed",
        "completions": pods.num_pods,
        "parallelism": pods.num_pods,
        "backoffLimit": 0,
        "template": {"metadata": {"labels": _labels(name)}, "spec": pod},
    }
    return _yaml([_document("v1", "Service", name, service), _document("batch/v1", "Job", name, job)])


def train_job_manifest(name: str, program: Sequence[str], pods: Pods) -> str:
    """A TrainJob, as YAML; the Trainer sets number of nodes and rendezvous for torchrun by PET_… variables.

    Raises:
        LaunchError: as `job_manifest`.
    """
    _check(name, program, pods)
    container = {"name": "node", "securityContext": _CONTAINER_SECURITY, "volumeMounts": pods.mounts}
    pod = {"securityContext": _POD_SECURITY, "containers": [container], "volumes": pods.volumes}
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    job = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": pods.image,
            "command": _agent([], program),
            "numNodes": pods.num_pods,
            "numProcPerNode": pods.workers_per_pod,
            "env": pods.variables,
            "resourcesPerNode": pods.resources,
        },
        "runtimePatches": [{"manager": "paceline", "trainingRuntimeSpec": patch}],
    }
    return _yaml([_document("trainer.kubeflow.org/v1alpha1", "TrainJob", name, job)])


def _document(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "labels": _labels(name)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _agent(options: Sequence[str], program: Sequence[str]) -> list[str]:
    # A worker that failed ends its pod, and with it the Job; the next Job resumes.
    words = ("python", "-m", "paceline.launch.agent", "--max-restarts=0", "--log-dir=/dev/null", *options, *program)
    return [_literal(word) for word in words]


def _literal(word: str) -> str:
    """Escape `word` for Kubernetes, which expands $(NAME) in commands and variables and reads $$ as $."""
    return word.replace("$", "$$")


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "paceline", "app.kubernetes.io/instance": name}


def _mebibytes(num_bytes: int) -> str:
    return f"{math.ceil(num_bytes / (1 << 20))}Mi"


def _check(name: str, program: Sequence[str], pods: Pods) -> None:
    if not _NAME.fullmatch(name) or len(name) > _MOST_NAME_CHARACTERS:
        raise LaunchError(
            f"The name {shown(name)} is invalid in Kubernetes; take lower-case letters, digits and - inside, "
            f"{_MOST_NAME_CHARACTERS} at most."
        )
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", pods.claim):
        raise LaunchError(f"{shown(pods.claim)} is not a valid name of a PersistentVolumeClaim.")
    if not program or not pods.image or not pods.image.isprintable() or " " in pods.image:
        raise LaunchError(f"image = {shown(pods.image)} should be the name of a container image; a program is needed.")
    leads_out = ".." in pods.mount.parts or ".." in pods.run_dir.parts
    if leads_out or not pods.mount.is_absolute() or not pods.run_dir.is_relative_to(pods.mount):
        raise LaunchError(
            f"The run folder {shortened(str(pods.run_dir))} should lie below {pods.mount}, where pods see their volume."
        )
    if not all(1 <= number <= MOST_WORKERS for number in (pods.num_pods, pods.workers_per_pod, pods.cpus_per_worker)):
        raise LaunchError(f"nodes, workers and cpus should each be from 1 to {MOST_WORKERS:,}.")


def _yaml(documents: Sequence[dict[str, Any]]) -> str:
    try:
        import yaml
    except ImportError:
        raise LaunchError("Manifests need PyYAML; install paceline[kubernetes].") from None
    # Through JSON, which repeats what occurs twice: people read manifests.
    return yaml.safe_dump_all(json.loads(json.dumps(documents)), sort_keys=False, width=120)
