"""Does another commit compute the same losses? Float64, two workers, models that draw no random numbers.

    python benchmarks/equal_losses.py --before CHECKOUT [--steps 6]

The same script trains under both commits. A row gives the largest relative difference of a step's loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"dropout": 0.0, "in_channels": 1, "image_size": 28},
    "lenet": {"in_channels": 1, "image_size": 28},
    "resnet20": {"in_channels": 3, "image_size": 32},
    "resnet18": {"in_channels": 3, "image_size": 16, "stem": "cifar"},
    "gpt2": {},
}
"""Without dropout, whose draws belong to blocks since 81d7c875; GPT-2 is that of transformers."""
OPTIONS = {
    "numeric": {"parity": "numeric"},
    "bitwise": {"parity": "bitwise"},
    "fsdp": {"parity": "numeric", "strategy": "fsdp"},
}
NUM_SAMPLES, BATCH_SIZE = 150, 44


def train(name: str, option: str, num_steps: int) -> None:
    """Print the losses of the first steps on rank 0: under the launcher."""
    from transformers import GPT2Config, GPT2LMHeadModel

    import paceline
    from paceline.models import build

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        outputs = model(inputs)
        return F.cross_entropy(getattr(outputs, "logits", outputs).flatten(0, -2), targets.flatten())

    torch.manual_seed(0)
    facts = MODELS[name]
    if name == "gpt2":
        sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        inputs = torch.randint(64, (NUM_SAMPLES, 32))
        data = TensorDataset(inputs, inputs.roll(-1, 1))
    else:
        model = build(name, num_classes=10, **facts)
        inputs = torch.randn(NUM_SAMPLES, facts["in_channels"], *[facts["image_size"]] * 2, dtype=torch.float64)
        data = TensorDataset(inputs, torch.randint(10, (NUM_SAMPLES,)))
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with paceline.init(global_batch_size=BATCH_SIZE, epochs=100, seed=3, **OPTIONS[option]) as run:  # type: ignore[arg-type]
        model, optimizer = run.prepare(model, optimizer)
        losses: list[float] = []
        for batch in run.batches(data):
            losses.append(float(run.step(batch, loss_fn)))
            if len(losses) == num_steps:
                break
        if run.rank == 0:
            print(json.dumps(losses), flush=True)


def losses_of(source: Path, *arguments: str) -> list[float]:
    command = [sys.executable, "-m", "paceline", "launch", "-n", "2", "--threads", "1", __file__, *arguments]
    environ = os.environ | {"PYTHONPATH": str(source.resolve() / "src"), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(arguments)} with {source} failed:\n{ended.stderr[-2000:]}")
    found: list[float] = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("[")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other commit")
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    print("| model | engine | largest relative difference of a loss |\n|---|---|---|")
    for name in MODELS:
        for option in OPTIONS:
            arguments = ["train", name, option, str(given.steps)]
            before, now = (losses_of(source, *arguments) for source in (given.before, Path(__file__).parents[1]))
            worst = max(abs(b - a) / abs(a) for a, b in zip(before, now, strict=True))
            print(f"| {name} | {option} | {worst:.1e} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
