"""Slurm: a program on a node of the current allocation, and a job script that asks for one.

Inside an allocation (`salloc`, `sbatch`) the nodes are those that Slurm allocated. Outside of one,
`batch_script` writes a job that runs the same command inside, and `submit` hands it to `sbatch`.
"""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launch.node_list import NodeSlots
from paceline.launch.variables import with_variables
from paceline.words import on_one_line

SAVE_BEFORE_LIMIT_S = 120
"""How long before the time limit of a job its run is asked to save and to end; Slurm itself may be a minute late."""
ASK_TIMEOUT_S = 30.0
"""Timeout for scontrol and sbatch; a busy controller needs some seconds."""

_WORD = re.compile(r"[A-Za-z0-9_.:@,+-]+")


def srun_argv(
    nodes: Sequence[str], program: Sequence[str], *, cwd: Path, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The local command that runs `program` once on each of `nodes`, in `cwd`; its standard input goes to all of them.

    One task a node that may use all that the job holds there. srun passes on the environment of this process; `environ`
    takes precedence.

    Raises:
        LaunchError: a node would be read as an option, or `environ` holds what looks like a secret.
    """
    for node in nodes:
        if not _WORD.fullmatch(node) or node.startswith("-") or "," in node:
            raise LaunchError(f"{node!r} is not the name of a Slurm node.")
    return (
        "srun",
        f"--nodelist={','.join(nodes)}",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        "--overlap",
        "--cpu-bind=none",  # otherwise a single task gets one core; workers are pinned by us
        "--kill-on-bad-exit=1",
        "--quiet",
        f"--chdir={cwd}",
        "--",
        *with_variables(program, environ),
    )


def allocation(environ: Mapping[str, str]) -> tuple[NodeSlots, ...]:
    """The nodes of the current allocation, with as many workers as GPUs were asked for there, else as tasks.

    Raises:
        LaunchError: there is no allocation, or Slurm's description of it cannot be read.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST")
    if nodelist is None:
        raise LaunchError(
            "This is not a Slurm allocation; get one with salloc or sbatch, or let paceline submit a job."
        )
    names = hostnames(nodelist)
    counts = _workers_per_node(environ, len(names))
    return tuple(NodeSlots(name, count) for name, count in zip(names, counts, strict=True))


def hostnames(nodelist: str) -> list[str]:
    """The names in Slurm's compressed list, such as gpu[03-05,9]-ib, as scontrol spells them out."""
    return _ask(["scontrol", "show", "hostnames", nodelist]).split()


def _workers_per_node(environ: Mapping[str, str], num_nodes: int) -> list[int]:
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        # "8", or "h100:8" as it was asked for.
        if found := re.fullmatch(r"(?:[^:,]+:)?([1-9][0-9]*)", environ.get(name, "")):
            return [int(found[1])] * num_nodes
    text = environ.get("SLURM_TASKS_PER_NODE", f"1(x{num_nodes})")
    groups = [re.fullmatch(r"([1-9][0-9]{0,5})(?:\(x([1-9][0-9]{0,5})\))?", part) for part in text.split(",")]
    counts = [int(found[1]) for found in groups if found for _ in range(int(found[2] or 1))]
    if None in groups or len(counts) != num_nodes:
        raise LaunchError(f"Slurm's SLURM_TASKS_PER_NODE = {text!r} does not fit an allocation of {num_nodes} nodes.")
    return counts


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
    time_limit_s: float | None = None,
    partition: str | None = None,
    account: str | None = None,
) -> str:
    """The script of a job for `sbatch`: a task per worker, a GPU per task, and `command` once, on the first node.

    What `command` writes goes to slurm-JOB.log in `run_dir`. Before the time limit the run saves and ends, and the job
    is put into the queue again; so it is after a lost node. None leaves an option to the cluster's own choice.

    Raises:
        LaunchError: a name that would end its line or begin another option, or a path with a line break.
    """
    options = [
        f"--job-name={_word('the job name', name)}",
        f"--nodes={num_nodes}",
        f"--ntasks-per-node={workers_per_node}",
        f"--cpus-per-task={cpus_per_worker}",
        *([f"--gpus-per-node={workers_per_node}"] if use_gpus else []),
        *([f"--time={math.ceil(time_limit_s / 60)}"] if time_limit_s is not None else []),
        *([f"--partition={_word('partition =', partition)}"] if partition is not None else []),
        *([f"--account={_word('account =', account)}"] if account is not None else []),
        f"--output={_log_pattern(run_dir)}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR2@{SAVE_BEFORE_LIMIT_S}",
    ]
    lines = [
        "#!/bin/sh",
        *(f"#SBATCH {option}" for option in options),
        "umask 077",  # files of a run are readable only by their owner
        f"cd -- {shlex.quote(str(cwd))} || exit 1",
        f"{shlex.join(command)} &",
        "run=$!",
        # Before the time limit the run saves and ends, and the job is put into the queue again, to go on.
        "trap 'limit=1; kill -TERM $run' USR2",
        "trap 'kill -TERM $run' TERM",
        "wait $run; code=$?",
        "while kill -0 $run 2> /dev/null; do wait $run; code=$?; done",  # a signal ends a wait
        '[ -z "$limit" ] || [ $code -eq 0 ] || exec scontrol requeue "$SLURM_JOB_ID"',
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def submit(script: str) -> str:
    """Hand a job script to sbatch; its job id.

    Raises:
        LaunchError: sbatch is missing or refuses; the sentence holds its reason.
    """
    answer = _ask(["sbatch", "--parsable"], script).strip()
    job_id = answer.partition(";")[0]  # "7;cluster" where there are several clusters
    if not re.fullmatch(r"[0-9]+", job_id):
        raise LaunchError(f"sbatch answered {answer!r}, which is not a job id.")
    return job_id


def _word(option: str, text: str) -> str:
    if not _WORD.fullmatch(text):
        raise LaunchError(f"{option} {text!r} should be one word of letters, digits and _ . : @ , + -.")
    return text


def _log_pattern(run_dir: Path) -> str:
    """Quote a value for sbatch: double quotes, and % doubled."""
    path = str(run_dir.absolute())
    if not path.isprintable() or '"' in path or "\\" in path:
        raise LaunchError(f"The run folder {path!r} has a name that Slurm cannot write to; choose a plain one.")
    return f'"{path.replace("%", "%%")}/slurm-%j.log"'


def _ask(argv: Sequence[str], stdin: str = "") -> str:
    """The answer of a command of Slurm on this machine."""
    try:
        # UTF-8 whatever the locale: paths in a script may have any bytes, and so may Slurm's reasons.
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=ASK_TIMEOUT_S,
        )
    except FileNotFoundError:
        where = "on this machine; run on a login node of the Slurm cluster"
        raise LaunchError(f"There is no {argv[0]} {where}.") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{argv[0]} has not answered within {ASK_TIMEOUT_S:.0f} s; is it overloaded?") from None
    if done.returncode != 0:
        raise LaunchError(f"{argv[0]} refused: {on_one_line(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout
