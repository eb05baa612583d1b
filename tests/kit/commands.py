"""Programs as a user starts them, each in a process of its own, and `paceline` without workers in a forked one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kit.workers import fork_process

TRACEBACK = "Traceback (most recent call last)"
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "SLURM_", "OMPI_", "PMI", "MASTER_", "TORCHELASTIC_", "OMP_")


def user_environ(**extra: str) -> dict[str, str]:
    """This process's environment as a user's shell has it: nothing says that it is a worker, or has GPUs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*_OF_LAUNCHERS, "PACELINE_"))}
    if extra.get("PYTHONPATH") and "PYTHONPATH" in kept:  # of the checkout that is tested
        extra["PYTHONPATH"] += os.pathsep + kept["PYTHONPATH"]
    return {**kept, "PACELINE_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo", "NO_COLOR": "1", "COLUMNS": "120", **extra}


def python(*arguments: str, cwd: Path, timeout_s: float = 240.0, **extra: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in the folder `cwd`, to its end; `extra` are environment variables."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=user_environ(**extra),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def paceline(*arguments: str, cwd: Path, timeout_s: float = 240.0, **extra: str) -> subprocess.CompletedProcess[str]:
    """`paceline ARGUMENTS` in the folder `cwd`, to its end. It loads torch: 2 to 4 processor seconds."""
    return python("-m", "paceline", *arguments, cwd=cwd, timeout_s=timeout_s, **extra)


def forked_paceline(*arguments: str, cwd: Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """`paceline ARGUMENTS` for commands that start no workers, forked from a process that has loaded torch."""
    with tempfile.TemporaryDirectory(prefix="paceline-command-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = fork_process(_run_forked, arguments, str(cwd), user_environ(), str(out), str(err))
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["paceline", *arguments], timeout_s)
        return subprocess.CompletedProcess(["paceline", *arguments], process.exitcode, out.read_text(), err.read_text())


def succeeded(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def _run_forked(arguments: tuple[str, ...], cwd: str, environ: dict[str, str], out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    for path, stream in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["paceline", *arguments]
    from paceline.cli.commands import main

    main()
