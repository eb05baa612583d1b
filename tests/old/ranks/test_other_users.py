"""Another user of the node, who knows every port, socket, file and process of a run, can neither run code in it nor
stop or change it."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.spec import RunRecord
from tests.old.ranks.attacking import PATIENCE_S, ROOT, attack_command, attacked_folder, check_attacks
from tests.old.ranks.command_line import clean_environ, paceline, succeeded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TRAIN = ("train", "digits-lenet", "--set", "epochs=10", "--set", "checkpoint.every_steps=50", "--threads", "1")
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
    with attacked_folder() as folder:
        yield folder


@pytest.mark.parametrize(
    ("settings", "where"),
    [(SYNC, ("--workers", "2")), (ASYNC, ("--workers", "2")), (SYNC, ("--hosts", "a:1,b:1"))],
    ids=["sync", "async", "agents"],
)
def test_nobody_gets_in(open_folder: Path, settings: tuple[str, ...], where: tuple[str, ...]) -> None:
    run_dir = open_folder / "run"
    with (
        _training(open_folder, run_dir, settings, where) as launcher,
        subprocess.Popen(attack_command(run_dir), cwd=ROOT, stdout=subprocess.PIPE, text=True) as attack,
    ):
        output, _ = launcher.communicate(timeout=PATIENCE_S * 2)
        tried, _ = attack.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == attack.returncode == 0, output
    check_attacks([tried], run_dir)
    if settings is SYNC:
        assert RunRecord.load(run_dir / "record.json").weights_sha256 == _undisturbed()


@functools.cache
def _undisturbed() -> str:
    """The weights of the same run on one worker that nobody attacks."""
    with tempfile.TemporaryDirectory() as folder:
        succeeded(paceline(*TRAIN, *SYNC, "--workers", "1", "--quiet", "--out", "run", cwd=Path(folder)))
        return RunRecord.load(Path(folder) / "run" / "record.json").weights_sha256


@contextlib.contextmanager
def _training(
    folder: Path, run_dir: Path, settings: tuple[str, ...], where: tuple[str, ...]
) -> Iterator[subprocess.Popen[str]]:
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir(exist_ok=True)
    ssh.write_text(SSH_HERE)
    ssh.chmod(0o755)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "paceline", *TRAIN, *settings, *where, "--quiet", "--out", str(run_dir)],
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
