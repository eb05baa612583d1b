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
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.nodes import cluster as namespaces

from paceline.checkpoint.load import list_checkpoints, list_unfinished, newest_good
from paceline.checkpoint.storage import open_storage
from paceline.spec import RunRecord

from .runs import END_S, OneNode, SeveralNodes, Worker, find_workers, train_for, wait_for_end, wait_for_steps

LATEST_S = 2.0
"""A strike comes at most so long after the run has made a step."""


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
