"""What each lossy way of aggregating gradients costs in accuracy: ResNet-20 on CIFAR-10, the same samples every time.

    python benchmarks/lossy.py --data DIR --out DIR [--seeds 1]

The first 10,240 training images for 6 epochs at a global batch of 64, on 2 workers with one thread each: sized for two
cores, so that absolute accuracy is low. Prints a table and leaves every run in --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMON = [
    "data.train_limit=10240",
    "data.test_limit=5000",
    "epochs=6",
    "eval_every_epochs=6",
    "global_batch_size=64",
    "virtual_shards=4",
    "optim.lr=0.05",
    "optim.base_batch_size=64",
    "optim.warmup_epochs=1.0",
]
WAYS: dict[str, list[str]] = {
    "float32, every step": [],
    "bfloat16": ["wire=bfloat16"],
    "float16": ["wire=float16"],
    "local_sgd, H=16": ["method=local_sgd"],
    "diloco, H=16": ["method=diloco"],
}


def train(data: Path, out: Path, way: str, seed: int) -> dict[str, Any]:
    """One run's result; a run that is there already is not done again."""
    name = "".join(c if c.isalnum() else "-" for c in way)
    folder = out / f"{name}-seed{seed}"
    if not (folder / "record.json").exists():
        settings = [*COMMON, *(f"aggregation.{setting}" for setting in WAYS[way]), f"seed={seed}"]
        command = [sys.executable, "-m", "paceline", "train", "cifar10-resnet20", "--workers", "2", "--threads", "1"]
        command += ["--data", str(data), "--out", str(folder), "--quiet", "--algorithm", "all_reduce"]
        command += [word for setting in settings for word in ("--set", setting)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    record: dict[str, Any] = json.loads((folder / "record.json").read_text())
    print(f"{way} seed {seed}: {record['accuracy']:.4f} in {record['wall_s']:.0f} s", file=sys.stderr)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-10's files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", help="ways with this in their name")
    arguments = parser.parse_args()
    ways = [way for way in WAYS if arguments.only is None or arguments.only in way]
    records: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for seed in range(arguments.seeds):
        for way in ways:
            records[way].append(train(arguments.data.resolve(), arguments.out, way, seed))
    base = statistics.mean(record["accuracy"] for record in records[ways[0]])
    print("| gradients | accuracy | against exact | test loss | train loss |\n|---|---|---|---|---|")
    for way, runs in records.items():
        accuracy, loss, train_loss = (
            statistics.mean(run[name] for run in runs) for name in ("accuracy", "loss", "train_loss")
        )
        print(f"| {way} | {accuracy:.2%} | {100 * (accuracy - base):+.2f} points | {loss:.3f} | {train_loss:.3f} |")


if __name__ == "__main__":
    main()
