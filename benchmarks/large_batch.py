"""What a larger global batch costs in accuracy, without and with a learning-rate rule and warm-up.

    python benchmarks/large_batch.py --data DIR --out DIR

ResNet-20 on the first 12,800 images of CIFAR-10 for 6 epochs: sized for two cores. The same samples every time; only
the global batch and the rule change. Prints a table and leaves every run in --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

BASE_BATCH = 64
COMMON = [
    "data.train_limit=12800",
    "data.test_limit=5000",
    "epochs=6",
    "eval_every_epochs=6",
    "optim.lr=0.05",
    f"optim.base_batch_size={BASE_BATCH}",
]
RECIPES = {
    "none": ["optim.lr_scaling='none'", "optim.warmup_epochs=0.0"],
    "linear": ["optim.warmup_epochs=1.0"],
    "sqrt": ["optim.lr_scaling='sqrt'", "optim.warmup_epochs=1.0"],
}


def train(data: Path, out: Path, batch: int, recipe: str, seed: int) -> dict[str, Any]:
    """One run's result; a run that is there already is not done again."""
    folder = out / f"batch{batch}-{recipe}-seed{seed}"
    if not (folder / "record.json").exists():
        # Shards of 16 samples at every batch, so batch norm sees the same number whatever the batch.
        settings = [*COMMON, *RECIPES[recipe], f"global_batch_size={batch}", f"virtual_shards={batch // 16}"]
        command = [sys.executable, "-m", "paceline", "train", "cifar10-resnet20", "--workers", "2", "--threads", "1"]
        command += ["--data", str(data), "--out", str(folder), "--quiet", "--set", f"seed={seed}"]
        command += [word for setting in settings for word in ("--set", setting)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    record: dict[str, Any] = json.loads((folder / "record.json").read_text())
    print(f"batch {batch} {recipe} seed {seed}: {record['accuracy']:.4f}", file=sys.stderr)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    cases = [(1, "none"), *((factor, recipe) for factor in (4, 16) for recipe in RECIPES)]
    accuracies: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
    for seed in range(arguments.seeds):
        for factor, recipe in cases:
            record = train(arguments.data.resolve(), arguments.out, BASE_BATCH * factor, recipe, seed)
            accuracies[factor, recipe].append(record["accuracy"])
    base = statistics.mean(accuracies[1, "none"])
    print("| global batch | rule and warm-up | accuracy | against the base | seeds |\n|---|---|---|---|---|")
    for (factor, recipe), values in accuracies.items():
        mean = statistics.mean(values)
        seeds = ", ".join(f"{value:.2%}" for value in values)
        print(f"| {BASE_BATCH * factor} | {recipe} | {mean:.2%} | {100 * (mean - base):+.2f} points | {seeds} |")


if __name__ == "__main__":
    main()
