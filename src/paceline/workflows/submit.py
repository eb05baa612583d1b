"""`paceline.submit`: a run for later, handed to a scheduler: a job of Slurm or Ray, or manifests for Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.errors import file_problems
from paceline.files import make_run_folder, replace_text
from paceline.launch.command_lines import output_of
from paceline.launch.kubernetes import manifest
from paceline.launch.slurm import batch_script
from paceline.plan.placement import place
from paceline.spec import Cluster, Device, Job, Node
from paceline.spec.codec import PositiveFloat, PositiveInt
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import is_script, resolve_job
from paceline.workflows.runs import new_run_dir

__all__ = ["SubmittedJob", "kubernetes", "ray", "slurm"]

SubmittedCommand = Literal["train", "launch", "scale"]
SCRIPT_FILE = "submit.sh"
ANSWER_S = 60.0
"""Timeout for a scheduler's answer; a busy one needs some seconds."""


@dataclass(frozen=True)
class SubmittedJob:
    """What a scheduler runs, and the folder of its run."""

    script: str
    run_dir: Path
    job_id: str = ""
    """Empty where it was not submitted."""
    advice: str = ""
    """How to see its output, and how to end it."""


@checked
def slurm(
    command: SubmittedCommand,
    arguments: Sequence[str] = (),
    *,
    nodes: PositiveInt = 1,
    workers: PositiveInt = 1,
    cpus: PositiveInt = 1,
    on_cpu: bool = False,
    out: Path | str | None = None,
    dry_run: bool = False,
) -> SubmittedJob:
    """Write a job script that runs `paceline COMMAND …` on the nodes of an allocation, and submit it.

    Partition, account, time limit and the like are those of sbatch's own variables, such as SBATCH_PARTITION,
    SBATCH_ACCOUNT and SBATCH_TIMELIMIT.
    Example: `print(paceline.submit.slurm("train", ["mnist-lenet"], nodes=2, workers=4, dry_run=True).script)`.

    Args:
        command: one of train, launch and scale; `arguments` follow it.
        nodes: number of nodes.
        workers: number of workers on each node, one per GPU.
        cpus: cores for each worker.
        on_cpu: train on CPUs, without GPUs.
        out: the run's folder, which all nodes see; None: a new one under runs/.
        dry_run: submit nothing and write nothing.

    Raises:
        LaunchError: Slurm refuses the script.
        JobError: a command that runs no workers, arguments that are no list of texts, or an invalid number.
    """
    run_dir = Path(out or f"runs/{command}") if dry_run else new_run_dir(out, command)
    script = batch_script(
        _program("slurm", command, run_dir, arguments),
        name=f"paceline-{command}",
        run_dir=run_dir,
        cwd=Path.cwd(),
        num_nodes=nodes,
        workers_per_node=workers,
        cpus_per_worker=cpus,
        use_gpus=not on_cpu,
    )
    if dry_run:
        return SubmittedJob(script, run_dir)
    with file_problems(f"The run folder {run_dir} cannot be used", remedy="name another one with out = DIR"):
        make_run_folder(run_dir)  # before the job begins: its output goes there
        replace_text(run_dir / SCRIPT_FILE, script)
    job_id = output_of(["sbatch", "--parsable"], ANSWER_S, script).strip().partition(";")[0]  # "7;cluster" of several
    advice = f"its output goes to {run_dir}/slurm-{job_id}.log; scancel {job_id} ends it"
    return SubmittedJob(script, run_dir, job_id, advice)


@checked
def ray(
    command: SubmittedCommand,
    arguments: Sequence[str] = (),
    *,
    address: str | None = None,
    out: Path | str | None = None,
    dry_run: bool = False,
) -> SubmittedJob:
    """Hand `paceline COMMAND …` to a Ray cluster as a job, whose workers run on the nodes of the cluster.

    Needs ray[default] on this machine, and there this folder and Paceline at the same paths.
    Example: `print(paceline.submit.ray("train", ["mnist-lenet"], dry_run=True).script)`.

    Args:
        command, arguments, out, dry_run: as for `slurm`.
        address: of the cluster's dashboard, such as "http://head:8265"; None: what RAY_ADDRESS says.

    Raises:
        LaunchError: Ray refuses the job, or no cluster answers.
        JobError: a command that runs no workers, or arguments that are no list of texts.
    """
    run_dir = Path(out or f"runs/{command}") if dry_run else new_run_dir(out, command)
    program = f"cd -- {shlex.quote(str(Path.cwd()))} && exec {shlex.join(_program('ray', command, run_dir, arguments))}"
    at = [] if address is None else ["--address", address]
    submission = ["ray", "job", "submit", "--no-wait", *at, "--", "sh", "-c", program]
    if dry_run:
        return SubmittedJob(shlex.join(submission), run_dir)
    told = re.search(r"raysubmit_\w+", output_of(submission, ANSWER_S))
    job_id = told[0] if told else ""
    advice = f"ray job logs -f {job_id} shows its output; ray job stop {job_id} ends it"
    return SubmittedJob(shlex.join(submission), run_dir, job_id, advice)


def _program(launcher: str, command: str, run_dir: Path, arguments: Sequence[str]) -> list[str]:
    own = ["--launcher", launcher, "--out", str(run_dir.absolute())]
    return [sys.executable, "-m", "paceline", command, *own, *arguments]


@checked
def kubernetes(
    job: Job | str | Path,
    arguments: Sequence[str] = (),
    *,
    image: str,
    claim: str,
    out: Path | str,
    mount: Path | str = Path("/data"),
    nodes: PositiveInt = 1,
    workers: PositiveInt = 1,
    cpus: PositiveInt = 1,
    on_cpu: bool = False,
    memory_gib: PositiveFloat | None = None,
    kind: Literal["job", "trainjob"] = "job",
    name: str | None = None,
    settings: Sequence[str] = (),
    data: str | Path | None = None,
) -> str:
    """Manifests for `kubectl apply -f -`: one pod for each node, PyTorch's elastic agent in each.

    Example: `paceline.submit.kubernetes("mnist-lenet", image="me/paceline", claim="data", out="/data/run")`.

    Args:
        job: a job file (TOML), the name of a recipe, a `Job`, or a script in the image with its `arguments`.
        image: a container image with Paceline in it; with @sha256:… it is the same on all nodes.
        claim: the PersistentVolumeClaim that all pods share.
        out: the run's folder, below the mount.
        mount: where pods see the volume.
        memory_gib: memory of each pod in GiB; None: no limit.
        kind: "job": any cluster; "trainjob": one with the Kubeflow Trainer.
        name: name of the Kubernetes Job; None: the name of the Paceline job.
        nodes, workers, cpus, on_cpu: as for `slurm`.
        data, settings: as for `train`.

    Raises:
        LaunchError: an invalid argument.
        JobError: a mistake in the job, or more workers than it has virtual shards.
    """
    if is_script(job, arguments, set=settings, data=data):
        program, stem = [str(job), *arguments], Path(str(job)).stem
    else:
        resolved, device = resolve_job(job, settings, data), Device("cpu" if on_cpu else "cuda", 0, "", 0)
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
