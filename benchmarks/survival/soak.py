"""Training under fire: an elastic run that is struck again and again, and what it leaves behind.

    python -m benchmarks.survival.soak [--minutes 30] [--workers 3] [--every 20,40] [--seed 0] [--kinds A,B] [--out DIR]

Every so many seconds something happens to the run (`strikes.py`), while the launcher brings it back by itself.
When the time is over it is asked to end, and started once more for its last steps. The weights then have to be those of
a run of as many steps that nobody disturbed, bit for bit; the launcher may not keep a process, a file handle or memory
for a fault, nor may anything stay in shared memory or in the temporary folder (of the whole machine: no other run may
use either meanwhile). The exit code says whether all that holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.old.ranks.launching import processes_of

from paceline.checkpoint.load import list_checkpoints, newest_good
from paceline.checkpoint.storage import open_storage
from paceline.spec import RunRecord

from .runs import OneNode, find_workers, train_for, wait_for_end
from .strikes import STRIKES, Struck

LAST_STEPS = 20
"""Of the run that is started once more when the faults are over."""

ENDLESS = ("epochs=1000000", "eval_every_epochs=1000000", "checkpoint.every_epoch=false")
"""Settings of a run that ends when it is told to."""


@dataclass(frozen=True)
class Footprint:
    """What the launcher holds, and what it left where others see it."""

    num_files: int
    memory_mb: float
    num_shared: int
    """Segments of shared memory on this machine that are ours."""
    num_temporary: int
    num_zombies: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = Path(f"/proc/{pid}/status").read_text()
        memory_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        files = list(Path(f"/proc/{pid}/fd").iterdir())
        return cls(len(files), memory_kb / 1024, *_left_behind(), len(_zombies_of(pid)))


@dataclass(frozen=True)
class Soaked:
    """What has become of a run under fire."""

    faults: tuple[str, ...]
    footprints: tuple[Footprint, ...]
    """Of the launcher, at every fault."""
    recoveries_s: tuple[float, ...]
    """From a failure to the end of the next update."""
    time_by_size_s: dict[int, float]
    """How long the run had so many workers."""
    num_steps: int
    weights_equal: bool
    num_processes_left: int
    num_left_behind: int
    """Segments of shared memory and temporary folders."""

    @property
    def is_clean(self) -> bool:
        """Whether the run was struck, learned what it should have, and left nothing; a line that happens to be open
        while the launcher talks to a worker is no leak."""
        first, last = self.footprints[0], self.footprints[-1]
        has_grown = (
            last.num_files > first.num_files + 2
            or last.memory_mb > 1.5 * first.memory_mb
            or last.num_temporary > first.num_temporary + 2
            or last.num_zombies > 2
        )
        return self.weights_equal and not (self.num_processes_left or self.num_left_behind > 0 or has_grown)

    def __str__(self) -> str:
        recoveries_s = sorted(self.recoveries_s) or [float("nan")]
        return (
            f"{len(self.faults)} faults in {self.num_steps} steps; weights equal: {self.weights_equal}\n"
            f"recovery: median {statistics.median(recoveries_s):.1f} s, most {recoveries_s[-1]:.1f} s, "
            f"{len(self.recoveries_s)} of them\n"
            f"time with so many workers: {_shares(self.time_by_size_s)}\n"
            f"left: {self.num_processes_left} processes, {self.num_left_behind} segments and temporary folders\n"
            f"launcher at the first fault: {self.footprints[0]}; at the last: {self.footprints[-1]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--every", default="20,40", help="seconds between two faults: least and most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(STRIKES), help="the kinds of faults, as 'kill one,kill all'")
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; a temporary one")
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="paceline-soak-"))).resolve()
    least_s, most_s = map(float, arguments.every.split(","))
    kinds = arguments.kinds.split(",")
    soaked = soak(out, arguments.minutes * 60, arguments.workers, arguments.seed, (least_s, most_s), kinds)
    print(soaked)
    raise SystemExit(not soaked.is_clean)


def soak(
    out: Path,
    duration_s: float,
    num_workers: int,
    seed: int,
    fault_s: tuple[float, float],
    kinds: Sequence[str] = tuple(STRIKES),
) -> Soaked:
    """Strike a run for so long, and until there is a checkpoint after a fault; see how it ends.

    Args:
        fault_s: seconds between two faults, least and most.
        kinds: names in `STRIKES`.
    """
    chance = random.Random(seed)
    folder = out / "struck"
    storage = open_storage(folder / "checkpoints")
    before = sum(_left_behind())
    elastic = ("--min-workers", "1", "--max-restarts", "20")
    launcher = OneNode().start(folder, num_workers, chance, ENDLESS, *elastic)
    faults: list[str] = []
    footprints: list[Footprint] = []
    until = time.monotonic() + duration_s
    next_fault = time.monotonic() + chance.uniform(*fault_s)
    while time.monotonic() < until or not (faults and list_checkpoints(storage)):
        if launcher.poll() is not None:
            raise ChildProcessError(f"The launcher has ended with {launcher.poll()}; see {folder / 'launcher.log'}.")
        time.sleep(0.2)
        workers = find_workers(folder)
        step = max((worker.step for worker in workers), default=-1)
        if time.monotonic() >= next_fault and step > 0:
            footprints.append(Footprint.of(launcher.pid))
            way = chance.choice(kinds)
            STRIKES[way](Struck(launcher.pid, workers, chance))
            faults.append(f"{way} at step {step}")
            print(f"{faults[-1]}; {footprints[-1]}", file=sys.stderr, flush=True)
            next_fault = time.monotonic() + chance.uniform(*fault_s)
    os.kill(launcher.pid, signal.SIGTERM)
    wait_for_end(folder, launcher)
    generations = json.loads((folder / "elastic.json").read_text())["generations"]
    found, problems = newest_good(storage)
    if found is None or problems:
        raise FileNotFoundError(f"No good checkpoint in {folder}, or damaged ones: {problems}.")
    num_steps = found.manifest.step + LAST_STEPS
    limit = ("--max-steps", str(num_steps))
    wait_for_end(folder, OneNode().start(folder, num_workers, chance, ENDLESS, *limit))
    return Soaked(
        tuple(faults),
        tuple(footprints),
        tuple(one["recovery_s"] for one in generations if one["recovery_s"] is not None),
        _time_by_size_s(generations),
        num_steps,
        RunRecord.load(folder / "record.json").weights_sha256 == train_for(out / "undisturbed", ENDLESS, *limit),
        len(processes_of(folder)),
        sum(_left_behind()) - before,
    )


def _time_by_size_s(generations: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """From elastic.json."""
    times_s: defaultdict[int, float] = defaultdict(float)
    for one in generations:
        times_s[one["world_size"]] += one["ended_at"] - one["began_at"]
    return dict(sorted(times_s.items()))


def _shares(time_by_size_s: Mapping[int, float]) -> str:
    whole_s = sum(time_by_size_s.values())
    return ", ".join(f"{size}: {time_s:.0f} s ({time_s / whole_s:.0%})" for size, time_s in time_by_size_s.items())


def _left_behind() -> tuple[int, int]:
    """Segments of shared memory, and temporary folders."""
    return (
        len(list(Path("/dev/shm").glob("paceline*"))),
        len(list(Path(tempfile.gettempdir()).glob("paceline-*"))),
    )


def _zombies_of(pid: int) -> list[int]:
    """Children of a process that have ended and were not waited for."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == pid:
                found.append(int(status.parent.name))
    return found


if __name__ == "__main__":
    main()
