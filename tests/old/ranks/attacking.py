"""Another user of a node, nobody, who is told everything about a run there and attacks it.

    python -m tests.old.ranks.attacking RUN_DIR MARKERS

Root starts it, on each node of a run, beside the run: it attacks once while workers connect to each other, and once
when they train. It prints what was possible and should not have been, then "DONE" with the number of attempts, and
holds its connections open until the run has ended on that node.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PATIENCE_S = 500.0
_ATTACKER = Path(__file__).with_name("attacker.py")
_NOBODY = 65534
_PUBLIC = ("/dev/null", "/dev/urandom", "/proc/", f"{sys.prefix}/", f"{sys.base_prefix}/", "/usr/", "/etc/", f"{ROOT}/")
"""Where files lie that everybody may read: a worker has one open while it imports or reads the ports of its node."""
_MPIRUN = "mpirun"
"""Its ports are left alone: it reads from each connection until that says who it is, so that one which says nothing
keeps it from starting workers. Nobody but Open MPI can change that (docs/security.md)."""
_AS_NOBODY: dict[str, Any] = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}


@contextlib.contextmanager
def attacked_folder() -> Iterator[Path]:
    """A folder that everybody may enter, unlike those of pytest: what is private in it is so by itself.

    Attackers leave files in its folder `markers` if they get to run code. Skips the test where nobody can attack.
    """
    if os.getuid() != 0:
        pytest.skip("Only root can start a process of another user.")
    if not _python_of_nobody():
        pytest.skip("No Python interpreter here can be run by the user nobody.")
    folder = Path(tempfile.mkdtemp(prefix="attacked-"))
    folder.chmod(0o755)
    (folder / "markers").mkdir()
    (folder / "markers").chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def attack_command(run_dir: Path) -> list[str]:
    """This program, for a run in an attacked folder; it has to start in `ROOT`."""
    return [sys.executable, "-m", "tests.old.ranks.attacking", str(run_dir), str(run_dir.parent / "markers")]


def check_attacks(outputs: Sequence[str], run_dir: Path) -> None:
    """See that attacks were made, and that none of them got anywhere; `outputs` are those of this program."""
    lines = [line for output in outputs for line in output.splitlines()]
    assert [line for line in lines if not line.startswith("DONE")] == []
    assert sum(int(line.split()[1]) for line in lines) > 100, lines
    assert not list((run_dir.parent / "markers").iterdir())


def _attack(run_dir: Path, markers: str) -> None:
    attackers = []
    for is_ready in (_workers_connect, _workers_train):
        _wait_until(lambda is_ready=is_ready: is_ready(run_dir))  # type: ignore[misc]
        command = [_python_of_nobody(), "-I", "-c", _ATTACKER.read_text(), markers]
        pipe = subprocess.PIPE
        attacker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd="/", env={}, **_AS_NOBODY)
        assert attacker.stdin is not None
        print(json.dumps(_targets(run_dir)), file=attacker.stdin, flush=True)  # it lives as long as this stays open
        attackers.append(attacker)
    for attacker in attackers:
        assert attacker.stdout is not None
        for line in attacker.stdout:
            print(line, end="", flush=True)
            if line.startswith("DONE"):
                break
        else:
            raise AssertionError("an attacker has ended before it tried everything")
    _wait_until(lambda: not _pids_of(run_dir), every_s=0.5)
    for attacker in attackers:
        attacker.kill()


def _targets(run_dir: Path) -> dict[str, Any]:
    """All that there is to know of a run on this node."""
    pids = _pids_of(run_dir)
    paths = {str(run_dir), *(str(path) for path in run_dir.rglob("*"))}
    tcp, unix = set(), set()
    for pid in pids:
        if _name_of(pid) == _MPIRUN:
            continue
        with contextlib.suppress(OSError):
            links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
            paths |= {link for link in links if link.startswith("/") and not link.startswith(_PUBLIC)}
            for row in map(str.split, Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]):
                if row[3] == "0A" and f"socket:[{row[9]}]" in links:
                    host, port = row[1].split(":")
                    tcp.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
            for row in map(str.split, Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]):
                if len(row) > 7 and f"socket:[{row[6]}]" in links:
                    unix.add(row[7])
    folders = {str(Path(path).parent) for path in paths | unix if "/paceline-" in path}
    return {"pids": pids, "tcp": sorted(tcp), "unix": sorted(unix), "paths": sorted(paths | folders)}


def _pids_of(run_dir: Path) -> list[int]:
    """Launcher, agents and workers: processes that name the folder, or whose children do."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            names = (process / "environ").read_bytes().split(b"\0")
            if f"PACELINE_RUN_DIR={run_dir}".encode() in names or str(run_dir).encode() in words:
                found.add(int(process.name))
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                if b"agent" in Path(f"/proc/{parent}/cmdline").read_bytes():
                    found.add(int(parent))
    return sorted(found - {os.getpid()})


def _name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _workers_connect(run_dir: Path) -> bool:
    return len(_targets(run_dir)["tcp"]) >= 2 or _workers_train(run_dir)


def _workers_train(run_dir: Path) -> bool:
    return (run_dir / "checkpoints" / "latest").exists()


def _wait_until(condition: Callable[[], bool], every_s: float = 0.05) -> None:
    """Wait; looking at every process of the machine takes its time, so that the run would be slower if done often."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(every_s)


def _python_of_nobody() -> str:
    """An interpreter that the user nobody may run; empty if there is none."""
    for python in (sys.executable, shutil.which("python3", path="/usr/bin:/bin")):
        with contextlib.suppress(OSError):
            command = [str(python), "-I", "-c", ""]
            if subprocess.run(command, cwd="/", env={}, check=False, **_AS_NOBODY).returncode == 0:
                return str(python)
    return ""


if __name__ == "__main__":
    _attack(Path(sys.argv[1]), sys.argv[2])
