"""Why SSH or Slurm cannot be between the nodes of a cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.kit.nodes.sshd import SSHD

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo")


def why_not_ssh() -> str | None:
    """Why there can be no SSH between nodes; None where there can."""
    missing = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None] + ([] if SSHD else ["sshd"])
    if missing:
        return f"SSH between nodes needs {', '.join(missing)} (openssh-server and openssh-client)"
    if not Path("/etc/ssh/ssh_config").exists():
        return "SSH between nodes needs a file /etc/ssh/ssh_config to lay its own over"
    return None


def why_not_slurm() -> str | None:
    """Why there can be no Slurm here; None where there can."""
    missing = [command for command in _COMMANDS if shutil.which(command, path=_PATH) is None]
    if missing:
        return f"Slurm on nodes needs {', '.join(missing)} (slurmctld, slurmd, slurm-client, munge)"
    if not Path("/etc/slurm").is_dir():
        return "Slurm on nodes needs a folder /etc/slurm to lay its own over"
    return None
