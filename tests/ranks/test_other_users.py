"""Another user of the node, who knows every port, socket, file and process of a run, can neither run code in it nor
stop or change it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from paceline.spec import RunRecord
from tests.ranks.command_line import clean_environ
from tests.ranks.launching import processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NOBODY = 65534
PATIENCE_S = 120.0
ATTACKER = Path(__file__).with_name("attacker.py")
AS_NOBODY: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
SYNC = ("--set", "parity=bitwise", "--set", "virtual_shards=4")
ASYNC = ("--set", "parity=numeric", "--set", "aggregation.method=parameter_server_async")

SSH_HERE = """\
#!/bin/sh
for word; do last=$word; done
exec sh -c "$last"
"""
"""In the place of ssh: runs the program on this node."""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter, unlike those of pytest: what is private in it is so by itself."""
    if os.getuid() != 0:
        pytest.skip("Only root can start a process of another user.")
    if not _python_of_nobody():
        pytest.skip("No Python interpreter here can be run by the user nobody.")
    folder = Path(tempfile.mkdtemp(prefix="attacked-"))
    folder.chmod(0o755)
    (folder / "markers").mkdir()
    (folder / "markers").chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("settings", "where"),
    [(SYNC, ("--workers", "2")), (ASYNC, ("--workers", "2")), (SYNC, ("--hosts", "a:1,b:1"))],
    ids=["sync", "async", "agents"],
)
def test_nobody_gets_in(open_folder: Path, settings: tuple[str, ...], where: tuple[str, ...]) -> None:
    run_dir = open_folder / "run"
    with _training(open_folder, run_dir, settings, where) as launcher, contextlib.ExitStack() as attackers:
        for is_ready in (_workers_listen, _workers_train):  # while workers connect to each other, and then
            deadline = time.monotonic() + PATIENCE_S
            while not is_ready(run_dir):
                assert time.monotonic() < deadline
                assert launcher.poll() is None, launcher.stdout and launcher.stdout.read()
                time.sleep(0.01)
            attackers.enter_context(_attack(open_folder, run_dir, must_end=is_ready is _workers_train))
        output, _ = launcher.communicate(timeout=PATIENCE_S * 2)
    assert launcher.returncode == 0, output
    assert not list((open_folder / "markers").iterdir())
    if settings is SYNC:
        alone = open_folder / "undisturbed"
        with _training(open_folder, alone, settings, ("--workers", "1")) as launcher:
            launcher.communicate(timeout=PATIENCE_S * 2)
        digests = [RunRecord.load(folder / "record.json").weights_sha256 for folder in (run_dir, alone)]
        assert digests[0] == digests[1]


@contextlib.contextmanager
def _training(
    folder: Path, run_dir: Path, settings: tuple[str, ...], where: tuple[str, ...]
) -> Iterator[subprocess.Popen[str]]:
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir(exist_ok=True)
    ssh.write_text(SSH_HERE)
    ssh.chmod(0o755)
    words = ["train", "digits-lenet", "--set", "epochs=10", "--set", "checkpoint.every_steps=50", "--threads", "1"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words, *settings, *where, "--quiet", "--out", str(run_dir)],
        env=clean_environ(PATH=f"{ssh.parent}:{os.environ['PATH']}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


@contextlib.contextmanager
def _attack(folder: Path, run_dir: Path, *, must_end: bool) -> Iterator[None]:
    """One attack from beginning to end; its connections are held open while the block is."""
    command = [_python_of_nobody(), "-I", "-c", ATTACKER.read_text(), str(folder / "markers")]
    attacker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", env={}, **AS_NOBODY
    )
    assert attacker.stdin is not None and attacker.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError), attacker.stdin:
            json.dump(_targets(run_dir), attacker.stdin)
        if must_end:
            assert _succeeded(attacker.stdout) == []
        yield
    finally:
        attacker.send_signal(signal.SIGKILL)
        attacker.wait()
        attacker.stdout.close()


def _succeeded(lines: IO[str]) -> list[str]:
    """What the attacker could do; waits until it has tried everything."""
    found: list[str] = []
    for line in lines:
        if line.startswith("DONE"):
            assert int(line.split()[1]) > 100  # it has tried something
            return found
        found.append(line.strip())
    raise AssertionError("the attacker has ended before it tried everything")


def _targets(run_dir: Path) -> dict[str, Any]:
    """All that there is to know of a run."""
    pids = [int(process.name) for process in processes_of(run_dir)]
    paths = {str(run_dir), *(str(path) for path in run_dir.rglob("*"))}
    tcp, unix = set(), set()
    for pid in pids:
        with contextlib.suppress(OSError):
            links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
            paths |= {link for link in links if link.startswith("/") and not link.startswith("/dev/")}
            for row in map(str.split, Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]):
                if row[3] == "0A" and f"socket:[{row[9]}]" in links:
                    host, port = row[1].split(":")
                    tcp.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
            for row in map(str.split, Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]):
                if len(row) > 7 and f"socket:[{row[6]}]" in links:
                    unix.add(row[7])
    folders = {str(Path(path).parent) for path in paths | unix if "/paceline-" in path}
    return {"pids": pids, "tcp": sorted(tcp), "unix": sorted(unix), "paths": sorted(paths | folders)}


def _workers_listen(run_dir: Path) -> bool:
    return len(_targets(run_dir)["tcp"]) >= 2


def _workers_train(run_dir: Path) -> bool:
    return (run_dir / "checkpoints" / "latest").exists()


def _python_of_nobody() -> str:
    """An interpreter that the user nobody may run; empty if there is none."""
    for python in (sys.executable, shutil.which("python3", path="/usr/bin:/bin")):
        with contextlib.suppress(OSError):
            command = [str(python), "-I", "-c", ""]
            if subprocess.run(command, cwd="/", env={}, check=False, **AS_NOBODY).returncode == 0:
                return str(python)
    return ""
