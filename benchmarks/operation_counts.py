"""What a training step asks torch for beside a plain loop over the same layers, and its time beside another commit's.

    python -m benchmarks.operation_counts count
    python -m benchmarks.operation_counts time --base CHECKOUT [--rounds 3] [--workers 1 2] [--cases lenet gpt]

`count` prints operations of one step with 8 virtual shards on one worker, and its limit: in numeric parity 1.3 times
those of the plain loop, in bitwise parity twice those and a backward pass for each shard. `time` runs this checkout and
the other one alternately and prints the median ratio of processor time per step, of all workers together: above 1, this
one is faster. Processor time, because machines that do other things at the same time stretch wall time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from tests.kit.workers import run_ranks
from tests.old.operations import CASES, count, our_steps, plain_backward, plain_step

ROOT = Path(__file__).parents[1]
PARITIES = ("numeric", "bitwise")
_NUM_STEPS = 8
_WARMUP_STEPS = 3


def print_counts(names: list[str]) -> None:
    """Markdown: a row for each model and parity, with and without views."""
    print("| model | parity | plain loop | limit | a step | a step / plain loop |\n|---|---|---|---|---|---|")
    for name in names:
        plain = count([plain_step(CASES[name])] * 2)
        backward = count([plain_backward(CASES[name])])
        limits = {"numeric": 1.3 * plain.num_calls, "bitwise": 2 * plain.num_calls + 8 * backward.num_calls}
        for parity in PARITIES:
            ours = count(our_steps(CASES[name], parity))
            cells = [
                f"{plain.num_calls} ({plain.num_kernels})",
                f"{limits[parity]:.0f}",
                f"{ours.num_calls} ({ours.num_kernels})",
                f"{ours.num_calls / plain.num_calls:.2f} ({ours.num_kernels / plain.num_kernels:.2f})",
            ]
            print(f"| {name} | {parity} | {' | '.join(cells)} |", flush=True)


def steps_s(names: list[str]) -> list[float]:
    """Median processor time of this worker's steps after the first ones, in seconds; by model, then by parity."""
    torch.set_num_threads(1)
    medians = []
    for name, parity in itertools.product(names, PARITIES):
        found = []
        for step in our_steps(CASES[name], parity, _NUM_STEPS):
            began = time.process_time()
            step()
            found.append(time.process_time() - began)
        medians.append(statistics.median(found[_WARMUP_STEPS:]))
    return medians


def measure(checkout: Path, names: list[str], num_workers: int) -> list[float]:
    """As `steps_s`, of all workers together, with the sources of a checkout."""
    command = [sys.executable, "-m", "benchmarks.operation_counts", "steps", str(num_workers), *names]
    path = os.pathsep.join([str(checkout / "src"), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


def print_ratios(base: Path, names: list[str], workers: list[int], rounds: int) -> None:
    """Markdown: a row for each model, parity and number of workers."""
    print("| model | parity | workers | time of the other / time of this one |\n|---|---|---|---|")
    for num_workers in workers:
        of_rounds = [
            [
                other / own
                for other, own in zip(*(measure(one, names, num_workers) for one in (base, ROOT)), strict=True)
            ]
            for _ in range(rounds)
        ]
        for (name, parity), *ratios in zip(itertools.product(names, PARITIES), *of_rounds, strict=True):
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"| {name} | {parity} | {num_workers} | {statistics.median(ratios):.2f} ({spread}) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    counting = commands.add_parser("count")
    timing = commands.add_parser("time")
    timing.add_argument("--base", type=Path, required=True)
    timing.add_argument("--rounds", type=int, default=3)
    timing.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    for one in (counting, timing):
        one.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    steps = commands.add_parser("steps")
    steps.add_argument("workers", type=int)
    steps.add_argument("cases", nargs="+")
    given = parser.parse_args()
    if given.command == "count":
        print_counts(given.cases)
    elif given.command == "time":
        print_ratios(given.base.resolve(), given.cases, given.workers, given.rounds)
    else:
        of_workers = run_ranks(steps_s, given.workers, given.cases, timeout_s=1500)
        print(*(sum(of_one) for of_one in zip(*of_workers, strict=True)))


if __name__ == "__main__":
    main()
