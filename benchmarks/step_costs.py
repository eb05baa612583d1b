"""What a training step asks of torch and of the host, beside a plain loop over the same virtual shards.

    python -m benchmarks.step_costs [--cases lenet resnet20 gpt] [--workers 1 2] [--shards 8] [--operators]

The plain loop is `zero_grad`, then a forward and a backward pass of each shard's weighted loss, then the optimizer's
step. A row gives the torch operators of a step on rank 0, those of the backward pass and the optimizer among them, its
median wall time, and the processor time of all threads of this worker; loop and step alternate in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from tests.kit.step_costs import CASES, WARMUP_STEPS, count, steps_of
from tests.kit.workers import run_ranks

TIMED_STEPS = 40


def measure(name: str, virtual_shards: int) -> list[list[float]]:
    """[wall, processor] time of the median loop, then of the median step, in seconds."""
    torch.set_num_threads(1)
    found: tuple[list[list[float]], list[list[float]]] = ([], [])
    for pair in steps_of(name, WARMUP_STEPS + TIMED_STEPS, virtual_shards):
        for call, times in zip(pair, found, strict=True):
            began = time.perf_counter(), time.process_time()
            call()
            times.append([time.perf_counter() - began[0], time.process_time() - began[1]])
    return [[statistics.median(column) for column in zip(*times[WARMUP_STEPS:], strict=True)] for times in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["lenet", "resnet20", "gpt"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--operators", action="store_true", help="list the operators that a step has more or fewer of")
    given = parser.parse_args()
    print("| model | workers | operators, loop | step | ratio | wall ms, loop | step | ratio | processor | ratio |")
    print("|---" * 10 + "|")
    for name in given.cases:
        for num_workers in given.workers:
            loop, step = run_ranks(count, num_workers, name, given.shards, timeout_s=220)[0]
            (loop_s, loop_cpu_s), (step_s, step_cpu_s) = run_ranks(
                measure, num_workers, name, given.shards, timeout_s=220
            )[0]
            print(
                f"| {name} | {num_workers} | {loop.total()} | {step.total()} | {step.total() / loop.total():.2f} "
                f"| {loop_s * 1e3:.1f} | {step_s * 1e3:.1f} | {step_s / loop_s:.2f} "
                f"| {step_cpu_s * 1e3:.1f} | {step_cpu_s / loop_cpu_s:.2f} |",
                flush=True,
            )
            if given.operators:
                step.subtract(loop)
                print(*(f"    {num:+d} {one}" for one, num in step.most_common() if num), sep="\n")


if __name__ == "__main__":
    main()
