"""Nodes as a user names them, and command lines that run a program there, by SSH or Slurm's srun, or in a container.

The local process has the program's standard streams. A container is `image.sif` or `docker://name@sha256:…` for
Apptainer, or `podman://name:tag`; in it the program sees the node's own network and /dev/shm, since workers talk
through both.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from paceline.errors import LaunchError, reason_of, shown

_NODE = re.compile(
    r"(?P<user>\w[\w.-]*@)?(?:(?P<name>\w[\w.-]*)|\[(?P<ipv6>[0-9a-f.]*:[0-9a-f:.]+(?:%[\w.-]+)?)\])"
    r"(?::(?P<count>[1-9][0-9]{0,5}))?",
    re.ASCII | re.IGNORECASE,
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


def parse_node_list(text: str) -> dict[str, int | None]:
    """The addresses in a text such as "a:8,kim@b:4,[fd00::3]", in their order, and the number of workers on each; None:
    as many as it has devices.

    An address is as `ssh` takes it: after its user, if one was given; IPv6 without brackets. Raises `LaunchError` for
    an invalid entry, a node named twice, or no node.
    """
    nodes: dict[str, int | None] = {}
    for number, entry in enumerate(text.split(","), 1):
        found = _NODE.fullmatch(entry.strip())
        if found is None:
            raise LaunchError(
                f"hosts, entry {number}: {shown(entry.strip())} should be a node such as gpu1, kim@gpu1:8 or "
                "[fd00::3]:8, with the number of its workers; ports and keys are for ~/.ssh/config."
            )
        name = found["name"] or found["ipv6"]
        if name.lower() in [address.rpartition("@")[2].lower() for address in nodes]:
            raise LaunchError(f"hosts, entry {number}: {name} was named before; name it once, with all its workers.")
        nodes[(found["user"] or "") + name] = int(found["count"]) if found["count"] else None
    return nodes


def with_variables(program: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """`program` behind `env`, which sets `environ` for it: ("env", "A=1", "python", …).

    All users of a node can read a command line: `environ` holds nothing but what Paceline sets itself.
    """
    return (*(["env"] if environ else []), *(f"{name}={value}" for name, value in environ.items()), *program)


def output_of(argv: Sequence[str], timeout_s: float, stdin: str = "", node: str = "") -> str:
    """What a program prints; `node` is where it runs, if not here. Raises `LaunchError` where it cannot be run, or
    fails; says why."""
    what = f"Nothing runs on {node}" if node else f"{argv[0]} failed"
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, errors="surrogateescape", timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise LaunchError(f"{what}: {reason_of(problem)}.") from None
    if done.returncode != 0:
        told = done.stderr.strip().rpartition("\n")[2].rstrip(".") or f"exit code {done.returncode}"
        raise LaunchError(f"{what}: {told}.")
    return done.stdout


def ssh_argv(host: str, program: Sequence[str], *, cwd: Path, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The command that runs `program` in `cwd` on `host`, whose shell must read POSIX quotes.

    It requests no terminal, so that bytes pass unchanged: a program whose client dies sees its standard input end, and
    must then end by itself.
    """
    options = [word for option in _SSH_OPTIONS for word in ("-o", option)]
    # A shell tells by its exit code which signal ended the program; ssh's own would be that of a lost connection, 255.
    told = shlex.quote(f"{shlex.join(with_variables(program, environ))}; exit $?")
    command = f"cd -- {shlex.quote(str(cwd))} && exec sh -c {told}"
    return ("ssh", "-T", *options, "--", host, command)


def srun_argv(
    nodes: Sequence[str], program: Sequence[str], *, cwd: Path, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The command that runs `program` once on each of `nodes`, in `cwd`; its standard input goes to all of them.

    One task a node that may use all that the job holds there. srun passes on the environment of this process; `environ`
    takes precedence.
    """
    places = (f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1")
    # A single task would get one core; workers are pinned by us.
    options = ("--cpu-bind=none", "--overlap", "--kill-on-bad-exit=1", "--quiet", f"--chdir={cwd}")
    return ("srun", *places, *options, "--", *with_variables(program, environ))


def container_argv(
    program: Sequence[str],
    image: str,
    *,
    cwd: Path,
    binds: Sequence[Path] = (),
    gpus: bool = False,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """The command that runs `program` inside `image`, in `cwd`, which it sees beside `binds` at their own paths.

    Apptainer keeps the node's variables: Slurm and Ray use them to name the job's devices. Podman passes only those of
    the scheduler, and ends all processes of the program with it. Raises `LaunchError` for an invalid image.

    Args:
        gpus: whether the node has NVIDIA GPUs to show; Podman needs the node's CDI description of them.
    """
    folders = list(dict.fromkeys((cwd, *binds)))
    inside = with_variables(program, {**_CONTAINER_VARIABLES, **environ})
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
