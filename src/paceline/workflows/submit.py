"""`paceline.submit`: a run for later, handed to a scheduler: a Slurm job script, or Kubernetes manifests."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import LaunchError, file_problems
from paceline.launch.kubernetes import Pods, manifest
from paceline.launch.slurm import batch_script
from paceline.launch.slurm import submit as submit_script
from paceline.plan import place
from paceline.regular_files import make_run_folder, replace_text
from paceline.spec import Cluster, Device, Job, Node, Plan
from paceline.spec.cluster import DeviceKind
from paceline.spec.job import MOST_WORKERS
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import check_names, is_script, resolve_job
from paceline.workflows.launch import check_script
from paceline.workflows.run_folder import check_folder, new_run_dir

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
    time_limit_s: float | None = None,
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
        time_limit_s: the time limit of the job; None: the cluster's.
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
    _check_num_workers(nodes, workers)
    if not dry_run and out is not None:
        check_folder(Path(out))
    run_dir = Path("runs") / command if dry_run and not out else new_run_dir(out, command)
    options = ["--launcher", "slurm", "--out", str(run_dir.absolute())]
    program = [command, *options, *arguments]
    script = batch_script(
        [sys.executable, "-m", "paceline", *program],
        name=f"paceline-{command}",
        run_dir=run_dir,
        cwd=Path.cwd(),
        num_nodes=nodes,
        workers_per_node=workers,
        cpus_per_worker=cpus,
        use_gpus=not on_cpu,
        time_limit_s=time_limit_s,
        partition=partition,
        account=account,
    )
    if dry_run:
        return SlurmJob(script, run_dir)
    was_there = out is not None and run_dir.exists()
    try:
        with file_problems(f"The run folder {run_dir} cannot be used", LaunchError, "name another one with out = DIR"):
            make_run_folder(run_dir)  # before the job begins: its output goes there
        job_id = submit_script(script)
    except LaunchError:
        if not was_there:
            with contextlib.suppress(OSError):  # it could not be made
                run_dir.rmdir()
        raise
    with file_problems(f"Slurm job {job_id} is submitted, but {run_dir / SCRIPT_FILE} cannot be written", LaunchError):
        replace_text(run_dir / SCRIPT_FILE, script)
    return SlurmJob(script, run_dir, job_id)


def check_command(command: str, given: Mapping[str, Any]) -> None:
    """Refuse what a command would refuse in the allocation, as far as that can be known here.

    Args:
        given: the values of the command's options, by the names of its workflow's parameters.

    Raises:
        LaunchError: an option that the submission decides, or a script that is not there.
        JobError: a mistake in the job.
    """
    if given.get("dry_run"):
        raise LaunchError(
            f"--dry-run behind {command} would be for the job, once it runs; to see the job script write "
            f"paceline submit slurm --dry-run {command} …"
        )
    if given.get("out") is not None:
        raise LaunchError(
            f"--out behind {command} would part the run from its log; write paceline submit slurm --out DIR {command} …"
        )
    for name in ("hosts", "hosts_file"):
        if given.get(name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise LaunchError(f"{option} behind {command} has no place here: Slurm chooses the nodes; leave it out.")
    if given.get("launcher", "auto") not in ("auto", "slurm"):
        raise LaunchError(f"--launcher behind {command} should be slurm, which runs the job; leave it out.")
    if command == "launch":
        check_script(given["script"], is_module=given["module"])
    if "job" in given:
        check_names(resolve_job(given["job"], given.get("settings"), given.get("data")))
    if given.get("plan") is not None:
        Plan.load(Path(given["plan"]))


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
    memory_bytes: int | None = None,
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
        memory_bytes: memory of each pod in bytes (on a command line also as 64GiB); None: no limit.
        kind: "job": any cluster; "trainjob": one with the Kubeflow Trainer.
        name: name of the Kubernetes Job; None: the name of the Paceline job.
        nodes, workers, cpus, on_cpu: as for `slurm`.
        model, data, settings: as for `train`.

    Raises:
        LaunchError: an invalid argument.
        JobError: a mistake in the job, or more workers than it has virtual shards.
    """
    _check_num_workers(nodes, workers)
    pods = Pods(
        image=image,
        num_pods=nodes,
        workers_per_pod=workers,
        use_gpus=not on_cpu,
        claim=claim,
        mount=Path(mount),
        run_dir=Path(out),
        cpus_per_worker=cpus,
        memory_bytes=memory_bytes,
    )
    if is_script(job, arguments, settings, data, model):
        program, stem = [str(job), *arguments], Path(str(job)).stem
    else:
        resolved = resolve_job(job, settings, data, model)
        plan = place(resolved, _pods_on_paper(pods), nodes * workers, threads_per_worker=cpus)
        plan = dataclasses.replace(plan, nodes=())  # torchrun tells every worker where it is
        texts = ["--job", json.dumps(resolved.to_mapping()), "--plan", json.dumps(plan.to_mapping())]
        program, stem = ["-m", "paceline.train", str(out), *texts], resolved.name
    return manifest(kind, name or stem.lower().replace("_", "-"), program, pods)


def _check_num_workers(nodes: int, workers: int) -> None:
    if nodes * workers > MOST_WORKERS:
        raise LaunchError(f"{nodes} nodes with {workers} workers each are more than {MOST_WORKERS:,} workers.")


def _pods_on_paper(pods: Pods) -> Cluster:
    """The nodes that the pods will be, as far as a plan asks for them."""
    kind: DeviceKind = "cuda" if pods.use_gpus else "cpu"
    devices = tuple(Device(kind, index, "", 0) for index in range(pods.workers_per_pod))
    cores = pods.workers_per_pod * pods.cpus_per_worker
    return Cluster(tuple(Node(f"pod{n}", cores, 0, "", devices, is_remote=True) for n in range(pods.num_pods)))
