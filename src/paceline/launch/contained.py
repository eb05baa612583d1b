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
"""A file that exists where NVIDIA's driver is loaded."""


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
        have_gpus = list(pool.map(lambda access: _succeeds_on(access, ["test", "-e", NVIDIA_DRIVER]), accesses))
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


def _output_on(access: NodeAccess, argv: Sequence[str]) -> str:
    try:
        done = access.run(argv, DIGEST_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise LaunchError(f"The image on {access.hostname} cannot be checked: {problem}.") from None
    if done.returncode != 0:
        explained = access.explain(done.returncode, done.stderr)
        raise LaunchError(explained or f"{access.hostname}: {' '.join(done.stderr.split()) or f'{argv[0]} failed'}")
    return done.stdout


def _succeeds_on(access: NodeAccess, argv: Sequence[str]) -> bool:
    try:
        _output_on(access, argv)
    except LaunchError:
        return False
    return True
