"""A container around a program: the command line of Apptainer or Podman, and what tells two images apart.

    image.sif, docker://name@sha256:…     Apptainer
    podman://name:tag                      Podman

The program sees the node's own network and /dev/shm, since workers talk through both. Standard input and output pass
through. Podman uses a new PID namespace: all processes that the program started end with it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

from paceline.errors import LaunchError, reason_of
from paceline.launch.remote_team import NodeAccess
from paceline.launch.variables import with_variables
from paceline.words import on_one_line

Runtime = Literal["apptainer", "podman"]

DIGEST_TIMEOUT_S = 600.0
"""Timeout for reading a whole image file: 20 GB from a slow network disk."""

NVIDIA_DRIVER = "/dev/nvidiactl"
"""A file that exists where NVIDIA's driver is loaded."""

# The caller's Python settings mean nothing inside, and Apptainer shows the program the caller's home.
_PYTHON = {"PYTHONPATH": "", "PYTHONHOME": "", "PYTHONNOUSERSITE": "1"}

# Variables that the node's scheduler sets for the job; Podman passes none by default.
_NODE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "SLURM_*", "NCCL_*", "GLOO_*")


def container_runtime(image: str) -> Runtime:
    """The program that runs `image`.

    Raises:
        LaunchError: it is neither a .sif file nor a name with docker:// or podman:// in front.
    """
    if re.fullmatch(r"docker://[^\s-]\S*", image) or (image.endswith(".sif") and not image.startswith("-")):
        return "apptainer"
    if re.fullmatch(r"podman://[^\s-]\S*", image):
        return "podman"
    raise LaunchError(f"The container {image!r} should be image.sif, docker://NAME@sha256:… or podman://NAME:TAG.")


def contained(
    accesses: Sequence[NodeAccess], image: str, *, cwd: Path, binds: Sequence[Path], python: str
) -> tuple[list[NodeAccess], str]:
    """Node accesses that run a program in `image`, which sees `cwd` and `binds`; and the image's digest.

    Args:
        python: the interpreter inside.

    Raises:
        LaunchError: a node lacks the image, or its image differs from that of the first node.
    """
    with ThreadPoolExecutor(max_workers=len(accesses)) as pool:
        digests = list(pool.map(lambda access: image_digest(image, lambda argv: _output_on(access, argv)), accesses))
        have_gpus = list(
            pool.map(lambda access: access.succeeds(["test", "-e", NVIDIA_DRIVER], DIGEST_TIMEOUT_S), accesses)
        )
    for access, digest in zip(accesses, digests, strict=True):
        if digest != digests[0]:
            raise LaunchError(
                f"{image} on {access.hostname} is {digest}, but on {accesses[0].hostname} {digests[0]}; copy one image "
                "to all nodes, or keep it on a file system that they share."
            )

    def inside(access: NodeAccess, gpus: bool) -> NodeAccess:
        def argv(program: Sequence[str]) -> Sequence[str]:
            return access.argv(in_container(program, image, cwd=cwd, binds=binds, gpus=gpus))

        return replace(access, argv=argv, python=python)

    return [inside(access, gpus) for access, gpus in zip(accesses, have_gpus, strict=True)], digests[0]


def in_container(
    program: Sequence[str],
    image: str,
    *,
    cwd: Path,
    binds: Sequence[Path] = (),
    gpus: bool = False,
) -> tuple[str, ...]:
    """The command that runs `program` inside `image`, in `cwd`, which it sees beside `binds` at their own paths.

    Apptainer keeps the node's variables: Slurm and Ray use them to name the job's devices, and --cleanenv would drop
    them. Python's own variables are emptied. Podman passes only those of the scheduler.

    Args:
        gpus: whether the node has NVIDIA GPUs to show; Podman needs the node's CDI description of them.

    Raises:
        LaunchError: an invalid image or path.
    """
    kind = container_runtime(image)
    inside = with_variables(program, _PYTHON)
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


def image_digest(image: str, run: Callable[[Sequence[str]], str]) -> str:
    """The digest ("sha256:…") of an image on a node; equal digests mean equal images. For a .sif it is the file's.

    `run` runs a command on the node and returns its output. The node needs no Paceline.

    Raises:
        LaunchError: there is no such image, or its name is ambiguous.
    """
    if container_runtime(image) == "podman":
        argv: tuple[str, ...] = ("podman", "image", "inspect", "--format={{.Digest}}", image.removeprefix("podman://"))
    elif image.endswith(".sif") and not image.startswith("docker://"):
        argv = ("sha256sum", "--", image)
    elif pinned := re.search(r"@(sha256:[0-9a-f]{64})$", image):
        return pinned.group(1)
    else:
        raise LaunchError(
            f"{image} may be another image on every node and on every day; name it by its digest, {image}@sha256:…, or "
            f"make a file of it once (apptainer pull image.sif {image})."
        )
    digest = re.search(r"(?:sha256:|\A\\?)([0-9a-f]{64})\b", run(argv))
    if digest is None:
        raise LaunchError(f"{argv[0]} does not say the digest of {image}; is it complete?")
    return f"sha256:{digest.group(1)}"


def _output_on(access: NodeAccess, argv: Sequence[str]) -> str:
    try:
        done = access.run(argv, DIGEST_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise LaunchError(f"The image on {access.hostname} cannot be checked: {reason_of(problem)}.") from None
    if done.returncode != 0:
        explained = access.explain(done.returncode, done.stderr)
        raise LaunchError(explained or f"{access.hostname}: {on_one_line(done.stderr) or f'{argv[0]} failed'}")
    return done.stdout


def _bindable(path: Path) -> Path:
    if not path.is_absolute() or re.search(r"[:,\n\"]", str(path)):
        raise LaunchError(
            f"The folder {str(path)!r} cannot be shown to a container; its path should have no : and no ,"
        )
    return path
