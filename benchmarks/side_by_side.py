"""Paceline beside plain DDP, Accelerate, Fabric and Lightning on two workers, alternately in one run.

    python benchmarks/side_by_side.py [--cases lenet gpt] [--shards 2,8] [--bf16] [--rounds 3]

Paceline has a row for each number of virtual shards: eight keep a result on any number of workers up to eight, two (one
on each worker) are normalised and draw as with DDP. Peers get the number of loader processes with which plain DDP is
fastest here. Medians over the rounds; ratios are to Paceline with the first number of shards.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers.trainers import CASES, TRAINERS

import paceline

SCRIPT = Path(__file__).parent / "peers" / "trainers.py"
COLUMNS = ("steps_per_s", "processor_s_per_step", "first_step_s", "peak_mib")
LOADER_WORKERS = ("0", "1", "2")
TRIAL_STEPS = 20
Rows = dict[str, tuple[str, ...]]
"""The trainer of each row, and options that it alone has."""
Result = dict[str, float]


def run(trainer: str, case: str, *options: str) -> Result:
    """What the clock of rank 0 saw."""
    if trainer == "paceline":
        launcher = [sys.executable, "-m", "paceline", "launch", "-n", "2", "--threads", "1"]
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "BENCH_STARTED_AT": repr(time.time()),
    }
    with tempfile.TemporaryDirectory() as folder:  # where runs leave their reports
        command = [*launcher, str(SCRIPT), trainer, case, *options]
        ended = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=900, check=False
        )
    if ended.returncode:
        raise SystemExit(f"{trainer} on {case} ended with exit code {ended.returncode}:\n{ended.stderr[-2000:]}")
    line = next(line for line in reversed(ended.stdout.splitlines()) if line.startswith("{"))
    result: Result = json.loads(line)
    return result


def best_loader_workers(case: str, options: list[str]) -> str:
    if not CASES[case].shape:  # texts, which lie in memory
        return "0"
    trial = [*options, "--steps", str(TRIAL_STEPS)]
    rates = {number: run("ddp", case, *trial, "--loader-workers", number)["steps_per_s"] for number in LOADER_WORKERS}
    return max(rates, key=rates.__getitem__)


def compare(case: str, rows: Rows, options: list[str], num_steps: int, rounds: int) -> None:
    """Print a row for each trainer, as part of a Markdown table."""
    loaders = best_loader_workers(case, options)
    results: dict[str, list[Result]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, found in results.items():
            trainer, *own = rows[name]
            found.append(run(trainer, case, *options, *own, "--steps", str(num_steps), "--loader-workers", loaders))
    reference = results[next(iter(rows))]
    for name, found in results.items():
        ratios = [one["steps_per_s"] / ours["steps_per_s"] for one, ours in zip(found, reference, strict=True)]
        figures = " | ".join(f"{statistics.median(one[column] for one in found):.3g}" for column in COLUMNS)
        each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {case} | {name} | {figures} | {statistics.median(ratios):.2f} ({each}) | {loaders} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--shards", default="2,8", help="Paceline's numbers of virtual shards")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    options = ["--bf16"] if arguments.bf16 else []
    shards = arguments.shards.split(",")
    rows: Rows = {f"paceline, {number} shards": ("paceline", "--virtual-shards", number) for number in shards}
    rows |= {name: (name,) for name in (*TRAINERS, "lightning") if name != "paceline"}
    # As pip does it for what is installed: an environment may keep Python from writing what it compiles.
    compileall.compile_dir(Path(paceline.__file__).parent, quiet=1)
    print(
        "| case | trainer | steps/s | processor s/step | first step s | peak MiB | steps/s over the first's | loaders |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case in arguments.cases:
        compare(case, rows, options, arguments.steps, arguments.rounds)


if __name__ == "__main__":
    main()
