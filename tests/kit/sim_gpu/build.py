"""Compiles the simulated device, once for each version of torch and of the source, and keeps it outside the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "native"
CACHE = Path(__file__).parents[3] / ".cache" / "sim_gpu"
TORCH = "2.13"
"""The version whose tables of functions the device replaces."""


def obstacle() -> str | None:
    """Why the device cannot be built here; None: it can, or is built already."""
    if not torch.__version__.startswith(TORCH):
        return f"the simulated GPU is written for torch {TORCH}, and this is {torch.__version__}"
    if torch.version.cuda is not None:
        return "the simulated GPU needs a torch built for CPUs, and this one is built for CUDA"
    if sys.platform != "linux":
        return "the simulated GPU is built on Linux only"
    if _compiler() is None and not library().exists():
        return "the simulated GPU needs a C++ compiler (g++ 12 or newer)"
    return None


def library() -> Path:
    """Where the compiled device lies, or will."""
    key = hashlib.sha256("\n".join([torch.__version__, sys.version, *_flags()]).encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.name.encode() + source.read_bytes())
    return CACHE / f"torch-{torch.__version__}-{key.hexdigest()[:16]}" / "simulated_cuda.so"


def build() -> Path:
    """The compiled device; whoever comes first compiles it, and others wait.

    Raises:
        RuntimeError: the compiler's messages.
    """
    target = library()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target)
    return target


def _compile(target: Path) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}")
    compiler = _compiler()
    assert compiler is not None
    command = [compiler, *_flags(), str(SOURCES / "module.cpp"), "-o", str(unfinished), *_libraries()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-10_000:]}")
    unfinished.rename(target)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _flags() -> list[str]:
    """Unoptimised: the time goes into torch's headers, and kernels are torch's own."""
    include = Path(torch.__file__).parent / "include"
    folders = [include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"]]
    return [
        "-std=c++20",
        "-O0",
        "-w",
        "-shared",
        "-fPIC",
        "-DUSE_DISTRIBUTED",
        *(f"-isystem{path}" for path in folders),
    ]


def _libraries() -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    return [f"-L{libraries}", *(f"-l{name}" for name in ("torch_cpu", "torch", "c10", "torch_python"))]


if __name__ == "__main__":
    began = time.monotonic()
    print(obstacle() or f"{build()} ({time.monotonic() - began:.0f} s)")
