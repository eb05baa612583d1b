"""What tests need of the system: programs of Debian's packages, and nodes made of namespaces.

Where something is missing a test skips and says so; where the variable CI is set it fails instead.
"""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

from tests.kit.nodes.cluster import why_not

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_PACKAGES = {
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "mpirun": "openmpi-bin",
    "mmdebstrap": "mmdebstrap",
    "g++": "g++",
}
"""Programs, and the packages that they are in."""


def need(*programs: str) -> None:
    """Go on only where these programs are installed."""
    for program in programs:
        if shutil.which(program, path=_PATH) is None:
            missing(f"needs Debian's package {_PACKAGES[program]}")


def need_nodes() -> None:
    """Go on only where namespaces can play machines."""
    if reason := why_not():
        missing(reason)


def missing(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
