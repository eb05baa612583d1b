"""What asynchronous servers learn on a quiet machine and beside busy processes: LeNet on the digits, real workers.

    python benchmarks/async_load.py [--workers 4] [--staleness 0,1,4] [--busy 0,20] [--epochs 5]

For each staleness and number of busy processes, the accuracy and the beginning of the weights' SHA-256. Busy processes
compute all the time at the workers' priority, until the run ends.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from busy_machine import neighbour

import paceline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--staleness", default="0,1,4", help="in updates")
    parser.add_argument("--busy", default="0,20", help="numbers of busy processes")
    parser.add_argument("--epochs", type=int, default=5)
    chosen = parser.parse_args()
    print("| staleness | busy processes | accuracy | weights |\n|---|---|---|---|")
    for staleness in map(int, chosen.staleness.split(",")):
        for num_busy in map(int, chosen.busy.split(",")):
            accuracy, weights = outcome(chosen.workers, staleness, num_busy, chosen.epochs)
            print(f"| {staleness} | {num_busy} | {100 * accuracy:.1f} % | {weights[:8]} |", flush=True)


def outcome(workers: int, staleness: int, num_busy: int, epochs: int) -> tuple[float, str]:
    """Accuracy and the weights' hash after training."""
    settings = (
        f"epochs={epochs}",
        "parity=numeric",
        "optim.warmup_epochs=0.5",
        "aggregation.method=parameter_server_async",
        f"aggregation.staleness={staleness}",
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as load:
        for _ in range(num_busy):
            load.enter_context(neighbour())
        record = paceline.train("digits-lenet", workers=workers, threads=1, settings=settings, out=Path(folder) / "run")
    assert record.accuracy is not None
    return record.accuracy, record.weights_sha256 or ""


if __name__ == "__main__":
    main()
