"""Slurm: the nodes of the current allocation, and a job script that asks for one.

Inside an allocation (`salloc`, `sbatch`) the nodes are those that Slurm allocated. Outside of one,
`batch_script` writes a job for `sbatch` that runs the same command inside.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline import env
from paceline.errors import LaunchError
from paceline.launch.command_lines import output_of

SAVE_BEFORE_LIMIT_S = 120
"""How long before the time limit of a job its run is asked to save and to end; Slurm itself may be a minute late."""

_BODY = """\
umask 077
cd -- {cwd} || exit 1
{command} &
run=$!
# Before the time limit the run saves and ends, and the job is put into the queue again, to go on.
trap 'limit=1; kill -TERM $run' USR2
trap 'kill -TERM $run' TERM
wait $run; code=$?
while kill -0 $run 2> /dev/null; do wait $run; code=$?; done
[ -z "$limit" ] || [ $code -eq 0 ] || exec scontrol requeue "$SLURM_JOB_ID"
exit $code
"""
"""Files of a run are readable only by their owner. A signal ends a `wait`, hence the loop."""


def allocation(environ: Mapping[str, str]) -> dict[str, int | None]:
    """The nodes of the current allocation, with as many workers as GPUs were asked for there, else as tasks. Raises
    `LaunchError` where there is no allocation, or Slurm's description of it cannot be read."""
    if "SLURM_JOB_NODELIST" not in environ:
        raise LaunchError("This is no Slurm allocation; get one with salloc or sbatch, or use paceline submit slurm.")
    # scontrol spells out compressed lists such as gpu[03-05,9]-ib; a busy controller needs some seconds.
    names = output_of(["scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]], timeout_s=30.0).split()
    # "8", or "h100:8" as it was asked for.
    gpus = environ.get("SLURM_GPUS_PER_NODE") or environ.get("SLURM_GPUS_ON_NODE", "")
    if found := re.fullmatch(r"(?:[^:,]+:)?([1-9]\d*)", gpus, re.ASCII):
        counts = [int(found[1])] * len(names)
    else:
        tasks = environ.get("SLURM_TASKS_PER_NODE", f"1(x{len(names)})")
        counts = env.tasks_per_node(tasks)
        if len(counts) != len(names):
            raise LaunchError(f"Slurm's SLURM_TASKS_PER_NODE = {tasks!r} does not fit {len(names)} nodes.")
    return dict(zip(names, counts, strict=True))


def batch_script(
    command: Sequence[str],
    *,
    name: str,
    run_dir: Path,
    cwd: Path,
    num_nodes: int,
    workers_per_node: int,
    cpus_per_worker: int,
    use_gpus: bool,
) -> str:
    """The script of a job for `sbatch`: a task per worker, a GPU per task, and `command` once, on the first node.

    What `command` writes goes to slurm-JOB.log in `run_dir`. Before the time limit the run saves and ends, and the job
    is put into the queue again; so it is after a lost node. Its time limit, partition and account are those of sbatch's
    variables, such as SBATCH_TIMELIMIT. Raises `LaunchError` for a folder that sbatch could not read.
    """
    folder = str(run_dir.absolute())
    if not folder.isprintable() or '"' in folder or "\\" in folder:
        raise LaunchError(f"The run folder {folder!r} has a name that Slurm cannot write to; choose a plain one.")
    options: dict[str, object] = {
        "job-name": name,
        "nodes": num_nodes,
        "ntasks-per-node": workers_per_node,
        "cpus-per-task": cpus_per_worker,
        "gpus-per-node": workers_per_node if use_gpus else None,
        "output": f'"{folder.replace("%", "%%")}/slurm-%j.log"',
        "open-mode": "append",
        "signal": f"B:USR2@{SAVE_BEFORE_LIMIT_S}",
    }
    head = [f"#SBATCH --{option}={value}" for option, value in options.items() if value is not None]
    body = _BODY.format(cwd=shlex.quote(str(cwd)), command=shlex.join(command))
    return "\n".join(["#!/bin/sh", *head, "#SBATCH --requeue", body])
