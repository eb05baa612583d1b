"""The environment of a result: versions, hardware, and the commit of the working directory."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import torch

import paceline
from paceline import env
from paceline.train.process.process_group import World


def describe_environment(world: World) -> dict[str, str]:
    """Facts for the reader of a record, as text."""
    facts = {
        "paceline": paceline.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "threads per worker": str(torch.get_num_threads()),
        "backend": "none (one worker)" if world.group is None else torch.distributed.get_backend(world.group),
        "started by": world.facts.started_by,
    }
    if world.device.type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(world.device)
        facts["CUDA"] = str(torch.version.cuda)
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if image := env.text(env.CONTAINER):
        facts["container"] = image
    commit = _git_commit()
    if commit:
        facts["git commit"] = commit
    return facts


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """The commit of the working directory, with a mark if files differ from it; None outside of git."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
