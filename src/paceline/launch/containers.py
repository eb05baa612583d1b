"""A container around a program: the command line of Apptainer or Podman.

    image.sif, docker://name@sha256:…     Apptainer
    podman://name:tag                      Podman

The program sees the node's own network and /dev/shm, since workers talk through both. Standard input and output pass
through. Podman uses a new PID namespace: all processes that the program started end with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from paceline.errors import LaunchError
from paceline.launch.variables import with_variables

# The caller's Python settings mean nothing inside, and Apptainer shows the program the caller's home.
_PYTHON = {"PYTHONPATH": "", "PYTHONHOME": "", "PYTHONNOUSERSITE": "1"}

# Variables that the node's scheduler sets for the job; Podman passes none by default.
_NODE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "SLURM_*", "NCCL_*", "GLOO_*")


def container_runtime(image: str) -> Literal["apptainer", "podman"]:
    """The program that runs `image`.

    Raises:
        LaunchError: it is neither a .sif file nor a name with docker:// or podman:// in front.
    """
    if re.fullmatch(r"docker://[^\s-]\S*", image) or (image.endswith(".sif") and not image.startswith("-")):
        return "apptainer"
    if re.fullmatch(r"podman://[^\s-]\S*", image):
        return "podman"
    raise LaunchError(f"The container {image!r} should be image.sif, docker://NAME@sha256:… or podman://NAME:TAG.")


def in_container(
    program: Sequence[str],
    image: str,
    *,
    cwd: Path,
    binds: Sequence[Path] = (),
    gpus: bool = False,
    environ: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """The command that runs `program` inside `image`, in `cwd`, which it sees beside `binds` at their own paths.

    Apptainer keeps the node's variables: Slurm and Ray use them to name the job's devices, and --cleanenv would drop
    them. Python's own variables are emptied. Podman passes only those of the scheduler.

    Args:
        gpus: whether the node has NVIDIA GPUs to show; Podman needs the node's CDI description of them.
        environ: variables for the program.

    Raises:
        LaunchError: an invalid image or path.
    """
    kind = container_runtime(image)
    inside = with_variables(program, _PYTHON | dict(environ or {}))
    folders = [_bindable(path) for path in dict.fromkeys((cwd, *binds))]
    if kind == "apptainer":
        options = [*(["--nv"] if gpus else []), *(f"--bind={path}:{path}" for path in folders), f"--pwd={cwd}"]
        return ("apptainer", "--silent", "exec", *options, image, *inside)
    options = [
        "--rm",
        "--interactive",
        "--network=host",
        "--ipc=host",
        "--pids-limit=-1",
        # Volumes keep their SELinux labels, since the run folder is shared with the node.
        "--security-opt=label=disable",
        *(["--device=nvidia.com/gpu=all"] if gpus else []),
        *(f"--env={name}" for name in _NODE_VARIABLES),
        *(f"--volume={path}:{path}" for path in folders),
        f"--workdir={cwd}",
        "--entrypoint=",
    ]
    return ("podman", "run", *options, image.removeprefix("podman://"), *inside)


def _bindable(path: Path) -> Path:
    if not path.is_absolute() or re.search(r"[:,\n\"]", str(path)):
        raise LaunchError(
            f"The folder {str(path)!r} cannot be shown to a container; its path should have no : and no ,"
        )
    return path
