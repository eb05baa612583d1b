"""Command lines that run a program elsewhere: on another node by SSH or Slurm's srun, or in a container.

The local process has the program's standard streams. A container is `image.sif` or `docker://name@sha256:…` for
Apptainer, or `podman://name:tag`; in it the program sees the node's own network and /dev/shm, since workers talk
through both.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import LaunchError

_SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(^|_|API|ACCESS|PRIVATE)KEY)S?(_|$)", re.IGNORECASE
)
_SSH_OPTIONS = (
    "BatchMode=yes",  # nobody can type a password or "yes"
    "ConnectTimeout=10",
    "ServerAliveInterval=5",  # three unanswered keep-alive messages mean a lost connection
    "ServerAliveCountMax=3",
    "ControlMaster=no",  # with connection sharing, the first connection would outlive its program
    "ClearAllForwardings=yes",  # two connections with the same forwarded port fail
)
"""ssh takes the first value of an option: the user's configuration does not change these."""
_CONTAINER_VARIABLES = {"PYTHONPATH": "", "PYTHONHOME": "", "PYTHONNOUSERSITE": "1"}
"""The caller's Python settings mean nothing inside, and Apptainer shows the program the caller's home."""
_NODE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "SLURM_*", "NCCL_*", "GLOO_*")
"""What the node's scheduler sets for the job; Podman passes none by default."""


def with_variables(program: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """`program` behind `env`, which sets `environ` for it: ("env", "A=1", "python", …).

    Raises:
        LaunchError: a variable looks like a secret, which all users of a node could read in the command line.
    """
    for name in environ:
        if _SECRET.search(name):
            raise LaunchError(
                f"{name} looks like a secret, and a command line can be read by everybody on the node; let the node "
                "itself set it: in ~/.profile, in ~/.ssh/environment, or from a Kubernetes Secret."
            )
    return (*(["env"] if environ else []), *(f"{name}={value}" for name, value in environ.items()), *program)


def ssh_argv(host: str, program: Sequence[str], *, cwd: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The command that runs `program` in `cwd` on `host`, whose shell must read POSIX quotes.

    It requests no terminal, so that bytes pass unchanged: a program whose client dies sees its standard input end, and
    must then end by itself.

    Raises:
        LaunchError: `environ` holds what looks like a secret.
    """
    options = [word for option in _SSH_OPTIONS for word in ("-o", option)]
    # The shell is replaced by the program.
    command = f"cd -- {shlex.quote(str(cwd))} && exec {shlex.join(with_variables(program, environ))}"
    return ("ssh", "-T", *options, "--", host, command)


def srun_argv(
    nodes: Sequence[str], program: Sequence[str], *, cwd: Path, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The command that runs `program` once on each of `nodes`, in `cwd`; its standard input goes to all of them.

    One task a node that may use all that the job holds there. srun passes on the environment of this process; `environ`
    takes precedence.

    Raises:
        LaunchError: `environ` holds what looks like a secret.
    """
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


def container_argv(
    program: Sequence[str],
    image: str,
    *,
    cwd: Path,
    binds: Sequence[Path] = (),
    gpus: bool = False,
    environ: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The command that runs `program` inside `image`, in `cwd`, which it sees beside `binds` at their own paths.

    Apptainer keeps the node's variables: Slurm and Ray use them to name the job's devices. Podman passes only those of
    the scheduler, and ends all processes of the program with it.

    Args:
        gpus: whether the node has NVIDIA GPUs to show; Podman needs the node's CDI description of them.
        environ: variables for the program.

    Raises:
        LaunchError: an invalid image.
    """
    folders = list(dict.fromkeys((cwd, *binds)))
    inside = with_variables(program, {**_CONTAINER_VARIABLES, **(environ or {})})
    if re.fullmatch(r"docker://[^\s-]\S*|[^-].*\.sif", image):
        options = [*(["--nv"] if gpus else []), *(f"--bind={path}:{path}" for path in folders), f"--pwd={cwd}"]
        return ("apptainer", "--silent", "exec", *options, image, *inside)
    if not re.fullmatch(r"podman://[^\s-]\S*", image):
        raise LaunchError(f"The container {image!r} should be image.sif, docker://NAME@sha256:… or podman://NAME:TAG.")
    options = [
        "--rm",
        "--interactive",
        "--network=host",
        "--ipc=host",
        "--pids-limit=-1",
        "--security-opt=label=disable",  # volumes keep their SELinux labels: the run folder is shared with the node
        *(["--device=nvidia.com/gpu=all"] if gpus else []),
        *(f"--env={name}" for name in _NODE_VARIABLES),
        *(f"--volume={path}:{path}" for path in folders),
        f"--workdir={cwd}",
        "--entrypoint=",
    ]
    return ("podman", "run", *options, image.removeprefix("podman://"), *inside)
