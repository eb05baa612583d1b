"""`paceline submit`: a run for later, handed to a scheduler: a Slurm job script, or Kubernetes manifests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.options import DataDir, Settings, parse_size
from paceline.errors import LaunchError, shortened
from paceline.workflows import submit as workflow

app = typer.Typer(no_args_is_help=True, help="Hand a run to Slurm or Kubernetes.")

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}

Nodes = Annotated[int, typer.Option(min=1, help="Number of nodes.")]
WorkersPerNode = Annotated[
    int, typer.Option("--workers", "-n", min=1, help="Number of workers on each node, one a GPU.")
]
Cpus = Annotated[int, typer.Option(min=1, help="Cores for each worker.")]
OnCpu = Annotated[bool, typer.Option("--cpu", help="Workers on CPU: ask for no GPU.")]


@app.command("slurm", context_settings={**CONTEXT, "allow_interspersed_args": False})
def slurm(
    context: typer.Context,
    command: Annotated[str, typer.Argument(help="train, launch, scale or bench, with what follows it.")],
    nodes: Nodes = 1,
    workers: WorkersPerNode = 1,
    cpus: Cpus = 1,
    on_cpu: OnCpu = False,
    time_limit: Annotated[str | None, typer.Option("--time", metavar="H:MM", help="Time limit of the job.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition of the cluster.")] = None,
    account: Annotated[str | None, typer.Option(help="Account that the job is charged to.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder, which all nodes see.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; submit nothing.")] = False,
) -> None:
    """Write a job script that runs `paceline COMMAND …` on the nodes of an allocation, and submit it."""
    job = workflow.slurm(
        command,
        context.args,
        nodes=nodes,
        workers=workers,
        cpus=cpus,
        on_cpu=on_cpu,
        time_limit_s=None if time_limit is None else parse_hours(time_limit),
        partition=partition,
        account=account,
        out=out,
        dry_run=dry_run,
    )
    if dry_run:
        print(job.script, end="")
        return
    log = f"{job.run_dir}/slurm-{job.job_id}.log"
    print(f"Slurm job {job.job_id}; its output goes to {log}. scancel {job.job_id} ends it.")


@app.command("kubernetes", context_settings=CONTEXT)
def kubernetes(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB|SCRIPT.py", help="A job, a recipe, or a script in the image.")],
    image: Annotated[
        str, typer.Option(help="Container image with Paceline; with @sha256:… it is the same on all nodes.")
    ],
    claim: Annotated[str, typer.Option(help="The PersistentVolumeClaim that all pods share.")],
    out: Annotated[Path, typer.Option(help="The run's folder, below the mount.")],
    mount: Annotated[Path, typer.Option(help="Where pods see the volume.")] = Path("/data"),
    nodes: Nodes = 1,
    workers: WorkersPerNode = 1,
    cpus: Cpus = 1,
    on_cpu: OnCpu = False,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of a pod, such as 64G.")] = None,
    kind: Annotated[
        Literal["job", "trainjob"], typer.Option(help="job: any cluster; trainjob: one with the Kubeflow Trainer.")
    ] = "job",
    name: Annotated[str | None, typer.Option(help="Name of the Kubernetes Job (default: the job's own).")] = None,
    settings: Settings = None,
    data: DataDir = None,
) -> None:
    """Print manifests for `kubectl apply -f -`: one pod a node, PyTorch's elastic agent in each."""
    manifests = workflow.kubernetes(
        job,
        context.args,
        image=image,
        claim=claim,
        out=out,
        mount=mount,
        nodes=nodes,
        workers=workers,
        cpus=cpus,
        on_cpu=on_cpu,
        memory_bytes=None if memory is None else parse_size(memory, "--memory"),
        kind=kind,
        name=name,
        settings=settings or (),
        data=data,
    )
    print(manifests, end="")


def parse_hours(text: str) -> float:
    """ "2:30" is two hours and a half, in seconds. Raises `LaunchError` for anything else."""
    found = re.fullmatch("([0-9]{1,5}):([0-5]?[0-9])", text)
    minutes = 0 if found is None else 60 * int(found[1]) + int(found[2])
    if not minutes:
        raise LaunchError(f"--time {shortened(text)} should be hours and minutes, such as 2:30.")
    return 60.0 * minutes
