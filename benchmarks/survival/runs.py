"""Runs to strike: started on one node or on several, found in the table of processes, and waited for."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.kit.nodes import cluster as namespaces
from tests.kit.nodes.sshd import ssh_between, start_sshd
from tests.old.ranks.launching import processes_of

from paceline.heartbeat import read_vitals
from paceline.spec import RunRecord

EVERY_STEPS = 10
SETTINGS = (
    "parity=bitwise",
    "virtual_shards=4",
    "epochs=12",
    "eval_every_epochs=6",
    f"checkpoint.every_steps={EVERY_STEPS}",
)
START_S, END_S = 120.0, 60.0

_PULSE = re.compile(r"(?P<path>/\S*/paceline-heartbeat-[^/]+/rank(?P<rank>\d+))$", re.MULTILINE)
"""A line of /proc/PID/maps."""


class Process(Protocol):
    """A launcher, wherever it runs."""

    pid: int

    def poll(self) -> int | None: ...


@dataclass(frozen=True)
class Worker:
    rank: int
    pid: int
    heartbeat: Path

    @property
    def step(self) -> int:
        return read_vitals(self.heartbeat).step or -1


def train_for(folder: Path, settings: Sequence[str] = (), *words: str) -> str:
    """The fingerprint of the weights of a run on one worker that nobody disturbs."""
    launcher = OneNode().start(folder, 1, random.Random(0), settings, *words)
    deadline = time.monotonic() + 3600
    while launcher.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return RunRecord.load(folder / "record.json").weights_sha256


def wait_for_steps(folder: Path, launcher: Process) -> int | None:
    """Until a step was made in this process; None if the run ended before."""
    deadline = time.monotonic() + START_S
    first: int | None = None
    while launcher.poll() is None:
        step = max((worker.step for worker in find_workers(folder)), default=-1)
        if first is None and step >= 0:
            first = step
        if first is not None and step > first:
            return step
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run in {folder} makes no step")
        time.sleep(0.02)
    return None


def wait_for_end(folder: Path, launcher: Process, timeout_s: float = END_S) -> None:
    deadline = time.monotonic() + timeout_s
    while launcher.poll() is None or processes_of(folder):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run in {folder} does not end")
        time.sleep(0.02)


def find_workers(folder: Path) -> list[Worker]:
    """The workers of the run in a folder that have begun, wherever they are on this machine; sorted by rank.

    A worker that was forked shows the environment of the fork server; what it has mapped is its own.
    """
    found = []
    for process in processes_of(folder):
        with contextlib.suppress(OSError):
            if heartbeat := _PULSE.search((process / "maps").read_text()):
                found.append(Worker(int(heartbeat["rank"]), int(process.name), Path(heartbeat["path"])))
    return sorted(found, key=lambda worker: worker.rank)


def _command(folder: Path, more_settings: Sequence[str], *words: str) -> list[str]:
    settings = [word for setting in (*SETTINGS, *more_settings) for word in ("--set", setting)]
    return [
        *(sys.executable, "-m", "paceline", "train", "digits-lenet", *settings, "--quiet"),
        *("--threads", "1", "--out", str(folder), "--hang-timeout", "5", *words),
    ]


class OneNode:
    """This machine."""

    layouts: Sequence[int] = (1, 2, 3, 4)
    nodes: Sequence[namespaces.Node] = ()

    def start(
        self, folder: Path, num_workers: int, _chance: random.Random, settings: Sequence[str] = (), *words: str
    ) -> Process:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "launcher.log", "ab") as log:
            return subprocess.Popen(
                _command(folder, settings, "--workers", str(num_workers), *words),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def repair(self) -> None:
        """Nothing is broken."""


class OnNode:
    """A launcher on a node, seen as a process."""

    def __init__(self, process: namespaces.NodeProcess) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return None if self._process.is_running else 0

    @property
    def output(self) -> str:
        return self._process.output


class SeveralNodes:
    """Three nodes from namespaces: the launcher on the first, workers on the other two."""

    layouts: Sequence[int] = (1, 2)

    def __init__(self, cluster: namespaces.Cluster, keys: Path) -> None:
        self.cluster = cluster
        self._keys = keys

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> Iterator[SeveralNodes]:
        with (
            tempfile.TemporaryDirectory() as keys,
            namespaces.Cluster(num_nodes=3, rate_bits_per_s=1e9) as cluster,
            ssh_between(cluster.nodes, Path(keys)),
        ):
            yield cls(cluster, Path(keys))

    @property
    def nodes(self) -> Sequence[namespaces.Node]:
        return self.cluster.nodes[1:]

    def start(
        self, folder: Path, num_workers: int, chance: random.Random, settings: Sequence[str] = (), *words: str
    ) -> OnNode:
        """`num_workers` on one node, another number on the other."""
        folder.mkdir(parents=True, exist_ok=True)
        shares = [num_workers, chance.choice(self.layouts)]
        hosts = ",".join(f"{node.hostname}:{share}" for node, share in zip(self.nodes, shares, strict=True))
        return OnNode(self.cluster.nodes[0].exec(_command(folder, settings, "--hosts", hosts, *words)))

    def repair(self) -> None:
        for node in self.cluster.nodes:
            if not node.is_up:
                node.boot()
                start_sshd(node, self._keys)
            node.link_up()
