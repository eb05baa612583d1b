"""Training under fire: an elastic run that is struck again and again, and what it leaves behind.

    python -m benchmarks.survival.soak [--minutes 30] [--workers 3] [--seed 0] [--out DIR]

Every 20 to 40 s a worker, or all of them, is killed or stopped, while the launcher brings the run back by itself. The
weights at the end have to be those of a run that nobody disturbed, bit for bit; the launcher may not keep a process, a
file handle or memory for it, nor may anything stay in shared memory or in the temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.spec import RunRecord

from .runs import OneNode, Worker, find_workers, train_for

FAULT_S = (20.0, 40.0)
STEPS_PER_MINUTE = 1200
"""About what a few workers on two cores make of the small job, restarts included; only the length depends on it."""


@dataclass(frozen=True)
class Footprint:
    """What the launcher holds."""

    num_files: int
    memory_mb: float
    num_shared: int
    """Segments of shared memory on this machine that are ours."""
    num_temporary: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = Path(f"/proc/{pid}/status").read_text()
        memory_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return cls(
            len(list(Path(f"/proc/{pid}/fd").iterdir())),
            memory_kb / 1024,
            len(list(Path("/dev/shm").glob("paceline*"))),
            len(list(Path(tempfile.gettempdir()).glob("paceline-pulse-*"))),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; a temporary one")
    arguments = parser.parse_args()
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="paceline-soak-"))).resolve()
    epochs = max(1, round(arguments.minutes * STEPS_PER_MINUTE / 23))
    settings = (f"epochs={epochs}", f"eval_every_epochs={epochs}")
    undisturbed = train_for(out / "undisturbed", settings)
    chance = random.Random(arguments.seed)
    folder = out / "struck"
    launcher = OneNode().start(
        folder, arguments.workers, chance, settings, "--min-workers", "1", "--max-restarts", "20"
    )
    footprints, faults = [], []
    next_fault = time.monotonic() + chance.uniform(*FAULT_S)
    while launcher.poll() is None:
        time.sleep(0.2)
        workers = find_workers(folder)
        if time.monotonic() >= next_fault and workers and max(worker.step for worker in workers) > 0:
            with contextlib.suppress(OSError, StopIteration):
                footprints.append(Footprint.of(launcher.pid))
            faults.append(_strike(workers, chance))
            print(f"{faults[-1]}; {footprints[-1]}", file=sys.stderr, flush=True)
            next_fault = time.monotonic() + chance.uniform(*FAULT_S)
    deadline = time.monotonic() + 10
    while find_workers(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    record = RunRecord.load(folder / "record.json")
    generations = json.loads((folder / "elastic.json").read_text())["generations"]
    recoveries = sorted(one["recovery_s"] for one in generations if one["recovery_s"] is not None)
    middle = recoveries[len(recoveries) // 2] if recoveries else float("nan")
    print(f"faults: {len(faults)}; generations: {len(generations)}; median recovery {middle:.1f} s")
    print(f"weights equal: {record.weights_sha256 == undisturbed}; processes left: {len(find_workers(folder))}")
    if footprints:
        print(f"launcher at first: {footprints[0]}; at last: {footprints[-1]}")


def _strike(workers: list[Worker], chance: random.Random) -> str:
    way = chance.choice(["kill one", "kill one", "kill all", "stop one"])
    struck = workers if way == "kill all" else [chance.choice(workers)]
    number = signal.SIGSTOP if way == "stop one" else signal.SIGKILL
    for worker in struck:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, number)
    return f"{way} at step {max(worker.step for worker in workers)}"


if __name__ == "__main__":
    main()
