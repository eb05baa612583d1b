"""The same nodes, with every program in a container: one image, equal on all of them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launch.containers import DIGEST_TIMEOUT_S, image_digest, in_container
from paceline.launch.remote_team import NodeAccess

NVIDIA_DRIVER = "/dev/nvidiactl"
"""Is there where NVIDIA's driver is loaded."""


def contained(
    reaches: Sequence[NodeAccess], image: str, *, cwd: Path, binds: Sequence[Path], python: str
) -> tuple[list[NodeAccess], str]:
    """Ways to the same nodes that run a program in `image`, which sees `cwd` and `binds`; and the image's digest.

    Args:
        python: the interpreter inside.

    Raises:
        LaunchError: a node lacks the image, or has another one than the first.
    """
    with ThreadPoolExecutor(max_workers=len(reaches)) as pool:
        digests = list(pool.map(lambda reach: image_digest(image, lambda argv: _output_on(reach, argv)), reaches))
        have_gpus = list(pool.map(lambda reach: _succeeds_on(reach, ["test", "-e", NVIDIA_DRIVER]), reaches))
    for reach, digest in zip(reaches, digests, strict=True):
        if digest != digests[0]:
            raise LaunchError(
                f"{image} on {reach.hostname} is {digest}, but on {reaches[0].hostname} {digests[0]}; copy one image "
                "to all nodes, or keep it on a file system that they share."
            )

    def inside(reach: NodeAccess, gpus: bool) -> NodeAccess:
        def argv(program: Sequence[str]) -> Sequence[str]:
            return reach.argv(in_container(program, image, cwd=cwd, binds=binds, gpus=gpus))

        return replace(reach, argv=argv, python=python)

    return [inside(reach, gpus) for reach, gpus in zip(reaches, have_gpus, strict=True)], digests[0]


def _output_on(reach: NodeAccess, argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            reach.argv(argv), capture_output=True, text=True, timeout=DIGEST_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise LaunchError(f"{reach.hostname} cannot be asked for its image: {problem}.") from None
    if done.returncode != 0:
        explained = reach.explain(done.returncode, done.stderr)
        raise LaunchError(explained or f"{reach.hostname}: {' '.join(done.stderr.split()) or f'{argv[0]} failed'}")
    return done.stdout


def _succeeds_on(reach: NodeAccess, argv: Sequence[str]) -> bool:
    try:
        _output_on(reach, argv)
    except LaunchError:
        return False
    return True
