"""How much memory and time the order of a large data set costs a worker.

    python benchmarks/order_memory.py --samples 10000000

Visits every global batch of an epoch as a worker does, and prints how far the process's resident memory grew at most,
the time a batch takes, and whether every sample came once (a bitmap of one bit a sample, not counted).
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

from paceline.data.order import ShuffledOrder
from paceline.spec import Job
from paceline.train.batches.data_progress import DataProgress


def resident_bytes() -> int:
    """The memory that this process has in RAM now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()
    job = Job(global_batch_size=options.batch)
    seen = np.zeros(options.samples // 8 + 1, np.uint8)
    seen[:] = 1  # its pages are in memory before anything is measured
    seen[:] = 0
    num_double = 0
    before = most = resident_bytes()
    progress = DataProgress(job, 0, 1)
    began = time.perf_counter()
    numbers = progress.enter(0, lambda epoch: ShuffledOrder(options.samples, options.batch, 0, epoch), options.samples)
    for number in numbers:
        own = np.concatenate(progress.batch(number, numbers.stop).own_shards)
        bits = np.left_shift(1, own & 7).astype(np.uint8)
        num_double += int(np.count_nonzero(seen[own >> 3] & bits))
        np.bitwise_or.at(seen, own >> 3, bits)
        most = max(most, resident_bytes())
    took_s = time.perf_counter() - began
    num_seen = int(np.unpackbits(seen).sum())
    print(
        f"{options.samples:,} samples in {len(numbers):,} batches of {options.batch}: {(most - before) / 1e6:.1f} MB "
        f"more at most, {took_s / len(numbers) * 1e6:.0f} us a batch, {num_seen:,} samples seen, {num_double:,} of "
        "them twice"
    )


if __name__ == "__main__":
    main()
