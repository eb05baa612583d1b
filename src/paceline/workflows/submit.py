"""`paceline.submit`: a run for later, handed to a scheduler: a Slurm job script, or Kubernetes manifests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.errors import LaunchError, file_problems
from paceline.launch.kubernetes import manifest
from paceline.launch.slurm import batch_script
from paceline.launch.slurm import submit as submit_script
from paceline.plan import place
from paceline.regular_files import make_run_folder, replace_text
from paceline.spec import Cluster, Device, Job, Node
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import is_script, resolve_job
from paceline.workflows.run_folder import new_run_dir

__all__ = ["SlurmJob", "kubernetes", "slurm"]

COMMANDS = ("train", "launch", "scale")
SCRIPT_FILE = "submit.sh"


@dataclass(frozen=True)
class SlurmJob:
    """A job script and the folder of its run; `job_id` is empty where it was not submitted."""

    script: str
    run_dir: Path
    job_id: str = ""


@checked
def slurm(
    command: str,
    arguments: Sequence[str] = (),
    *,
    nodes: int = 1,
    workers: int = 1,
    cpus: int = 1,
    on_cpu: bool = False,
    max_minutes: float | None = None,
    partition: str | None = None,
    account: str | None = None,
    out: Path | str | None = None,
    dry_run: bool = False,
) -> SlurmJob:
    """Write a job script that runs `paceline COMMAND …` on the nodes of an allocation, and submit it.

    Example: `print(paceline.submit.slurm("train", ["mnist-lenet"], nodes=2, workers=4, dry_run=True).script)`.

    Args:
        command: one of train, launch and scale; `arguments` follow it.
        nodes: number of nodes.
        workers: number of workers on each node, one per GPU.
        cpus: cores for each worker.
        on_cpu: train on CPUs, without GPUs.
        max_minutes: the time limit of the job; None: the cluster's.
        partition: the partition of the cluster; None: its default.
        account: the account that the job is charged to; None: the user's default.
        out: the run's folder, which all nodes see; None: a new one under runs/.
        dry_run: submit nothing and write nothing.

    Raises:
        LaunchError: a command that runs no workers, or Slurm refuses the script.
        JobError: arguments that are no list of texts, or an invalid number.
    """
    if command not in COMMANDS:
        raise LaunchError(f"paceline submit slurm {command!r} is not possible; submit {', '.join(COMMANDS)}.")
    run_dir = Path(out or f"runs/{command}") if dry_run else new_run_dir(out, command)
    script = batch_script(
        [
            sys.executable,
            "-m",
            "paceline",
            command,
            "--launcher",
            "slurm",
            "--out",
            str(run_dir.absolute()),
            *arguments,
        ],
        name=f"paceline-{command}",
        run_dir=run_dir,
        cwd=Path.cwd(),
        num_nodes=nodes,
        workers_per_node=workers,
        cpus_per_worker=cpus,
        use_gpus=not on_cpu,
        time_limit_s=None if max_minutes is None else 60 * max_minutes,
        partition=partition,
        account=account,
    )
    if dry_run:
        return SlurmJob(script, run_dir)
    with file_problems(f"The run folder {run_dir} cannot be used", LaunchError, "name another one with out = DIR"):
        make_run_folder(run_dir)  # before the job begins: its output goes there
        replace_text(run_dir / SCRIPT_FILE, script)
    return SlurmJob(script, run_dir, submit_script(script))


@checked
def kubernetes(
    job: Job | str | Path,
    arguments: Sequence[str] = (),
    *,
    image: str,
    claim: str,
    out: Path | str,
    mount: Path | str = Path("/data"),
    nodes: int = 1,
    workers: int = 1,
    cpus: int = 1,
    on_cpu: bool = False,
    memory_gib: float | None = None,
    kind: Literal["job", "trainjob"] = "job",
    name: str | None = None,
    settings: Sequence[str] = (),
    model: str | Callable[..., Any] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
) -> str:
    """Manifests for `kubectl apply -f -`: one pod for each node, PyTorch's elastic agent in each.

    Example: `paceline.submit.kubernetes("mnist-lenet", image="me/paceline", claim="data", out="/data/run")`.

    Args:
        job: a job, a job file, the name of a recipe, or a script in the image, with `arguments` for the script.
        image: a container image with Paceline in it; with @sha256:… it is the same on all nodes.
        claim: the PersistentVolumeClaim that all pods share.
        out: the run's folder, below the mount.
        mount: where pods see the volume.
        memory_gib: memory of each pod in GiB; None: no limit.
        kind: "job": any cluster; "trainjob": one with the Kubeflow Trainer.
        name: name of the Kubernetes Job; None: the name of the Paceline job.
        nodes, workers, cpus, on_cpu: as for `slurm`.
        model, data, settings: as for `train`.

    Raises:
        LaunchError: an invalid argument.
        JobError: a mistake in the job, or more workers than it has virtual shards.
    """
    runs_script = is_script(job, arguments, settings, data, model)
    if runs_script:
        program, stem = [str(job), *arguments], Path(str(job)).stem
    else:
        resolved, device = resolve_job(job, settings, data, model), Device("cpu" if on_cpu else "cuda", 0, "", 0)
        devices = tuple(replace(device, index=index) for index in range(workers))
        on_paper = (Node(f"pod{n}", workers * cpus, 0, "", devices, is_remote=True) for n in range(nodes))
        plan = place(resolved, Cluster(tuple(on_paper)), nodes * workers, threads_per_worker=cpus)
        plan = replace(plan, nodes=())  # torchrun tells every worker where it is
        texts = ["--job", json.dumps(resolved.to_mapping()), "--plan", json.dumps(plan.to_mapping())]
        program, stem = ["-m", "paceline.train", str(out), *texts], resolved.name
    return manifest(
        kind,
        name or stem.lower().replace("_", "-"),
        program,
        image=image,
        num_pods=nodes,
        workers_per_pod=workers,
        use_gpus=not on_cpu,
        claim=claim,
        mount=Path(mount),
        run_dir=Path(out),
        cpus_per_worker=cpus,
        memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
    )
