"""`paceline submit`: a run for later, handed to a scheduler: a Slurm job script, or Kubernetes manifests."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.bench import parse_size
from paceline.cli.options import DataDir, Settings
from paceline.errors import LaunchError
from paceline.launch import slurm
from paceline.launch.kubernetes import Pods, job_manifest, train_job_manifest
from paceline.plan import place
from paceline.spec import Cluster, Device, DeviceKind, Job, Node
from paceline.workflows.jobs import resolve_job
from paceline.workflows.run_folder import new_run_dir

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Hand a run to Slurm or Kubernetes.")

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
COMMANDS = ("train", "launch", "scale", "bench")
SCRIPT_FILE = "submit.sh"

Nodes = Annotated[int, typer.Option(min=1, help="Nodes.")]
Workers = Annotated[int, typer.Option("--workers", "-n", min=1, help="Workers a node, one a GPU.")]
Cpus = Annotated[int, typer.Option(min=1, help="Cores a worker.")]
OnCpu = Annotated[bool, typer.Option("--cpu", help="Workers on CPU: ask for no GPU.")]


@app.command("slurm", context_settings=CONTEXT)
def on_slurm(
    context: typer.Context,
    command: Annotated[str, typer.Argument(help="train, launch, scale or bench, with what follows it.")],
    nodes: Nodes = 1,
    workers: Workers = 1,
    cpus: Cpus = 1,
    on_cpu: OnCpu = False,
    time_limit: Annotated[str | None, typer.Option("--time", metavar="H:MM", help="Of the whole job.")] = None,
    partition: Annotated[str | None, typer.Option()] = None,
    account: Annotated[str | None, typer.Option()] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder, which all nodes see.")] = None,
    show: Annotated[bool, typer.Option("--dry-run", help="Print the script; submit nothing.")] = False,
) -> None:
    """Write a job script that runs `paceline COMMAND …` on the nodes of an allocation, and submit it."""
    if command not in COMMANDS:
        raise LaunchError(f"paceline submit slurm {command!r} is not possible; submit {', '.join(COMMANDS)}.")
    run_dir = out or (Path("runs") / command if show else new_run_dir(None, Job(name=command)))
    inside = [sys.executable, "-m", "paceline", command]
    place_of_options = 2 if command == "bench" else 1  # behind the name of the benchmark
    arguments = [*context.args[: place_of_options - 1], "--launcher", "slurm", "--out", str(run_dir.absolute())]
    script = slurm.batch_script(
        [*inside, *arguments, *context.args[place_of_options - 1 :]],
        name=f"paceline-{command}",
        run_dir=run_dir,
        cwd=Path.cwd(),
        num_nodes=nodes,
        workers_per_node=workers,
        cpus_per_worker=cpus,
        use_gpus=not on_cpu,
        time_limit_s=None if time_limit is None else parse_hours(time_limit),
        partition=partition,
        account=account,
    )
    if show:
        print(script, end="")
        return
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    (run_dir / SCRIPT_FILE).write_text(script, encoding="utf-8")
    job_id = slurm.submit(script)
    print(f"Slurm job {job_id}; its words go to {run_dir}/slurm-{job_id}.log. scancel {job_id} ends it.")


@app.command("kubernetes", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def on_kubernetes(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB|SCRIPT.py", help="A job, a recipe, or a script in the image.")],
    image: Annotated[str, typer.Option(help="With Paceline in it; with @sha256:… it is the same on all nodes.")],
    claim: Annotated[str, typer.Option(help="The PersistentVolumeClaim that all pods share.")],
    out: Annotated[Path, typer.Option(help="The run's folder, below the mount.")],
    mount: Annotated[Path, typer.Option(help="Where pods see the volume.")] = Path("/data"),
    nodes: Nodes = 1,
    workers: Workers = 1,
    cpus: Cpus = 1,
    on_cpu: OnCpu = False,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of a pod, such as 64G.")] = None,
    kind: Annotated[
        Literal["job", "trainjob"], typer.Option(help="job: any cluster; trainjob: one with the Kubeflow Trainer.")
    ] = "job",
    name: Annotated[str | None, typer.Option(help="Of the Job; the job's own.")] = None,
    settings: Settings = None,
    data: DataDir = None,
) -> None:
    """Print manifests for `kubectl apply -f -`: one pod a node, PyTorch's elastic agent in each."""
    pods = Pods(
        image=image,
        num_pods=nodes,
        workers_per_pod=workers,
        use_gpus=not on_cpu,
        claim=claim,
        mount=mount,
        run_dir=out,
        cpus_per_worker=cpus,
        memory_bytes=None if memory is None else parse_size(memory, "--memory"),
    )
    if job.endswith(".py"):
        program, stem = [job, *context.args], Path(job).stem
    else:
        resolved = resolve_job(job, settings, data)
        plan = place(resolved, _pods_on_paper(pods), nodes * workers, threads_per_worker=cpus)
        plan = dataclasses.replace(plan, nodes=())  # torchrun tells every worker where it is
        texts = ["--job", json.dumps(resolved.to_mapping()), "--plan", json.dumps(plan.to_mapping())]
        program, stem = ["-m", "paceline.train", str(out), *texts], resolved.name
    manifest = job_manifest if kind == "job" else train_job_manifest
    print(manifest(name or stem.lower().replace("_", "-"), program, pods), end="")


def _pods_on_paper(pods: Pods) -> Cluster:
    """What the pods will have, as far as a plan asks for it."""
    kind: DeviceKind = "cuda" if pods.use_gpus else "cpu"
    devices = tuple(Device(kind, index, "", 0) for index in range(pods.workers_per_pod))
    cores = pods.workers_per_pod * pods.cpus_per_worker
    return Cluster(tuple(Node(f"pod{n}", cores, 0, "", devices, is_remote=True) for n in range(pods.num_pods)))


def parse_hours(text: str) -> float:
    """ "2:30" is two hours and a half, in seconds. Raises `LaunchError` for anything else."""
    hours, colon, minutes = text.partition(":")
    if not (colon and hours.isdigit() and minutes.isdigit() and int(minutes) < 60 and int(hours) + int(minutes) > 0):
        raise LaunchError(f"--time {text} should be hours and minutes, such as 2:30.")
    return 3600.0 * int(hours) + 60.0 * int(minutes)
