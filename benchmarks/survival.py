"""The crash matrix: kill a run in every way, at random moments, again and again, and look at what is left of it.

    python -m benchmarks.survival [--only NAME,…] [--times 20] [--seed 0] [--out DIR]

A small job (LeNet on the digits in the package, parity "bitwise") trains with a checkpoint every 10 steps. Each case
strikes at a random moment, starts the run again in the same folder on another number of workers, and so on, until it
has struck so many times and the run is over; then another run begins. In the end every run's weights have to be those
of the run that nobody disturbed, bit for bit. Cases with nodes need root and sshd.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.hosts import cluster as namespaces
from tests.hosts.sshd import ssh_between, start_sshd

from paceline.checkpoint.load import list_checkpoints, list_unfinished, newest_good
from paceline.checkpoint.storage import open_storage
from paceline.pulse import read_vitals
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
LATEST_S = 2.0
"""A strike comes at most so long after the run has made a step."""


class Process(Protocol):
    """A launcher, wherever it runs."""

    pid: int

    def poll(self) -> int | None: ...


@dataclass(frozen=True)
class Worker:
    rank: int
    pid: int
    pulse: Path

    @property
    def step(self) -> int:
        return read_vitals(self.pulse).step or -1


@dataclass
class Scene:
    """A run in full swing."""

    folder: Path
    launcher_pid: int
    chance: random.Random
    nodes: Sequence[namespaces.Node] = ()
    """Those with workers; the launcher runs on another one."""

    def workers(self) -> list[Worker]:
        return find_workers(self.folder)


def kill_one(scene: Scene) -> None:
    _kill(scene.chance.choice(scene.workers()).pid)


def kill_all(scene: Scene) -> None:
    for worker in scene.workers():
        _kill(worker.pid)


def kill_launcher(scene: Scene) -> None:
    _kill(scene.launcher_pid)


def kill_while_saving(scene: Scene) -> None:
    """Somebody or all, in whatever phase of saving or pruning it is soon after a folder without manifest is seen."""
    storage = open_storage(scene.folder / "checkpoints")
    deadline = time.monotonic() + LATEST_S
    while not list_unfinished(storage) and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(scene.chance.uniform(0, 0.02))
    scene.chance.choice([kill_one, kill_all, kill_launcher])(scene)


def kill_agent(scene: Scene) -> None:
    agents = _processes_with("-m paceline agent")
    mine = [pid for pid in agents if _is_on(pid, scene.nodes)]
    _kill(scene.chance.choice(mine))


def crash_node(scene: Scene) -> None:
    scene.chance.choice(scene.nodes).crash()


def power_off(scene: Scene) -> None:
    scene.chance.choice(scene.nodes).power_off()


def cut_link(scene: Scene) -> None:
    scene.chance.choice(scene.nodes).link_down()


ON_ONE_NODE: dict[str, Callable[[Scene], None]] = {
    "any rank": kill_one,
    "all ranks": kill_all,
    "the launcher": kill_launcher,
    "while saving": kill_while_saving,
}
ON_NODES: dict[str, Callable[[Scene], None]] = {
    "an agent": kill_agent,
    "a node crashes": crash_node,
    "power off": power_off,
    "link cut": cut_link,
}


@dataclass
class Result:
    """What a case has shown."""

    name: str
    num_strikes: int = 0
    num_runs: int = 0
    num_equal: int = 0
    """Runs that ended with the undisturbed run's weights."""
    lost_steps: list[int] = field(default_factory=list)
    """Of each strike: steps made beyond the newest good checkpoint."""
    num_unfinished: int = 0
    """Strikes that left a folder without a manifest."""
    num_without: int = 0
    """Strikes after which no good checkpoint was found although one had been written."""

    def row(self) -> str:
        lost = max(self.lost_steps, default=0)
        return (
            f"| {self.name} | {self.num_strikes} | {self.num_equal} of {self.num_runs} | {lost} | "
            f"{self.num_unfinished} | {self.num_without} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases, such as 'any rank,power off'; all")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; a temporary one")
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="paceline-survival-"))).resolve()
    wanted = [name for name in arguments.only.split(",") if name]
    undisturbed = train_for(out / "undisturbed")
    print("| case | strikes | runs with equal weights | most steps lost | left unfinished | no good one found |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in wanted or [*ON_ONE_NODE, *ON_NODES]:
        chance = random.Random(f"{arguments.seed} {name}")
        with contextlib.ExitStack() as stack:
            place = OneNode() if name in ON_ONE_NODE else stack.enter_context(SeveralNodes.open())
            strike = (ON_ONE_NODE | ON_NODES)[name]
            print(measure(name, strike, place, out, undisturbed, arguments.times, chance).row(), flush=True)


def train_for(folder: Path, settings: Sequence[str] = ()) -> str:
    """The fingerprint of the weights of a run on one worker that nobody disturbs."""
    launcher = OneNode().start(folder, 1, random.Random(0), settings)
    deadline = time.monotonic() + 3600
    while launcher.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return RunRecord.load(folder / "record.json").weights_sha256


def measure(
    name: str,
    strike: Callable[[Scene], None],
    place: OneNode | SeveralNodes,
    out: Path,
    undisturbed: str,
    times: int,
    chance: random.Random,
) -> Result:
    result = Result(name)
    while result.num_strikes < times:
        folder = out / name.replace(" ", "-") / str(result.num_runs)
        while not (folder / "record.json").exists():
            launcher = place.start(folder, chance.choice(place.layouts), chance)
            first_step = wait_for_steps(folder, launcher)
            if first_step is not None and result.num_strikes < times:
                time.sleep(chance.uniform(0, LATEST_S))
                scene = Scene(folder, launcher.pid, chance, place.nodes)
                step = max((worker.step for worker in scene.workers()), default=-1)
                if step < 0 or launcher.poll() is not None:
                    continue  # it was over before
                had_one = bool(list_checkpoints(open_storage(folder / "checkpoints")))
                strike(scene)
                result.num_strikes += 1
                wait_for_end(folder, launcher)
                place.repair()
                look(result, folder, step, had_one)
            else:
                wait_for_end(folder, launcher, END_S * 3)
        result.num_runs += 1
        result.num_equal += RunRecord.load(folder / "record.json").weights_sha256 == undisturbed
    return result


def look(result: Result, folder: Path, step: int, had_one: bool) -> None:
    storage = open_storage(folder / "checkpoints")
    result.num_unfinished += bool(list_unfinished(storage))
    found, _ = newest_good(storage)
    if found is not None:
        result.lost_steps.append(max(0, step - found.manifest.step))
    elif had_one:
        result.num_without += 1


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
    while launcher.poll() is None or find_workers(folder):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run in {folder} does not end")
        time.sleep(0.02)


def find_workers(folder: Path) -> list[Worker]:
    """The workers of the run in a folder, wherever they are on this machine; sorted by rank."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, KeyError, ValueError):
            entries = (entry.partition("=") for entry in (process / "environ").read_bytes().decode().split("\0"))
            variables = {name: value for name, _, value in entries}
            if variables["PACELINE_RUN_DIR"] != str(folder) or b"paceline" not in (process / "cmdline").read_bytes():
                continue
            found.append(Worker(int(variables["RANK"]), int(process.name), Path(variables["PACELINE_PULSE"])))
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


class _OnNode:
    """A launcher on a node, seen as a process."""

    def __init__(self, process: namespaces.NodeProcess) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return None if self._process.is_running else 0


class SeveralNodes:
    """Three nodes from namespaces: the launcher on the first, workers on the other two."""

    layouts: Sequence[int] = (1, 2)

    def __init__(self, cluster: namespaces.Cluster, keys: Path) -> None:
        self._cluster = cluster
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
        return self._cluster.nodes[1:]

    def start(self, folder: Path, num_workers: int, chance: random.Random) -> Process:
        """`num_workers` on one node, another number on the other."""
        folder.mkdir(parents=True, exist_ok=True)
        shares = [num_workers, chance.choice(self.layouts)]
        hosts = ",".join(f"{node.hostname}:{share}" for node, share in zip(self.nodes, shares, strict=True))
        return _OnNode(self._cluster.nodes[0].exec(_command(folder, (), "--hosts", hosts)))

    def repair(self) -> None:
        for node in self._cluster.nodes:
            if not node.is_up:
                node.boot()
                start_sshd(node, self._keys)
            node.link_up()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _processes_with(*words: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if any(word in line for word in words):
                found.append(int(process.name))
    return found


def _is_on(pid: int, nodes: Sequence[namespaces.Node]) -> bool:
    with contextlib.suppress(OSError):
        own = Path(f"/proc/{pid}/ns/net").readlink()
        return any(Path(f"/proc/{node.init_pid}/ns/net").readlink() == own for node in nodes)
    return False


if __name__ == "__main__":
    main()
