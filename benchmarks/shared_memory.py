"""Two workers of one node: the backend's all-reduce beside the one through shared memory, alternately in one run.

    python benchmarks/shared_memory.py --rounds 21

Prints the median times, and the median of the ratios taken round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from paceline.comm.shared_memory import SharedMemory

SIZES_MB = (1, 10, 100)
TIMEOUT_S = 60.0


def worker(rank: int, num_workers: int, store: str, rounds: int, answer: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_workers, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    shared = SharedMemory.open(group, [range(num_workers)], TIMEOUT_S)
    assert shared is not None
    contestants: dict[str, Callable[[Tensor], object]] = {
        "gloo": lambda values: dist.all_reduce(values),
        "shared_memory": shared.all_reduce,
    }
    rows = []
    for size_mb in SIZES_MB:
        values = torch.empty(size_mb * 250_000)
        times_s: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds + 1):
            for name, contestant in contestants.items():
                values.fill_(rank + 1.0)
                dist.barrier()
                began = time.perf_counter()
                contestant(values)
                times_s[name].append(time.perf_counter() - began)
                assert (values == num_workers * (num_workers + 1) / 2).all()
        # Without the first round, in which pages are touched and connections warm up.
        gloo, ours = times_s["gloo"][1:], times_s["shared_memory"][1:]
        rows.append(summary(size_mb, gloo, ours))
    if rank == 0:
        Path(answer).write_text(json.dumps(rows))
    dist.destroy_process_group()


def summary(size_mb: int, gloo_s: list[float], ours_s: list[float]) -> dict[str, Any]:
    return {
        "size_mb": size_mb,
        "gloo_ms": round(1e3 * statistics.median(gloo_s), 3),
        "shared_memory_ms": round(1e3 * statistics.median(ours_s), 3),
        "ratio": round(statistics.median(a / b for a, b in zip(gloo_s, ours_s, strict=True)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    # Set for the workers, which inherit it: nothing of this leaves the machine.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        spawn(
            worker,
            (arguments.workers, f"{folder}/store", arguments.rounds, str(answer)),
            nprocs=arguments.workers,
        )
        for row in json.loads(answer.read_text()):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
