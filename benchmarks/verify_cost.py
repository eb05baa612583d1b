"""What `paceline verify` costs beside the two runs that it compares: seconds, and memory of the largest process.

    python -m benchmarks.verify_cost [--width 256] [--rounds 3]

Trains 4 steps of a transformer under DistributedDataParallel: by torchrun on 1 and on 2 workers, and by verify.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, NUM_STEPS, LENGTH, NUM_TOKENS = 8, 4, 64, 512


def train(batch: int, width: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(NUM_TOKENS, width), *layers, nn.Linear(width, NUM_TOKENS))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank = dist.get_rank()
    for step in range(NUM_STEPS):
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(0, NUM_TOKENS, (BATCH, LENGTH + 1), generator=draw)[rank * batch : (rank + 1) * batch]
        nn.functional.cross_entropy(wrapped(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def cost(program: list[str]) -> tuple[float, float]:
    """Seconds, and MB of the largest of its processes."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", *program], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(program)} failed")
    return time.perf_counter() - begin, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int)
    arguments = parser.parse_args()
    if arguments.batch is not None:
        train(arguments.batch, arguments.width)
        return
    script = [__file__, "--width", str(arguments.width), "--batch"]
    run = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
    verify = ["paceline", "verify", "--batch", str(BATCH), "-n", "2", *script[:1], "--", *script[1:], "{batch}"]
    for _ in range(arguments.rounds):
        runs = [cost([*run, str(count), *script, str(BATCH // count)]) for count in (1, 2)]
        whole, memory = cost(verify)
        print(
            f"two runs {sum(one[0] for one in runs):.1f} s, verify {whole:.1f} s "
            f"({whole / sum(one[0] for one in runs):.2f}); largest process {max(one[1] for one in runs):.0f} MB, "
            f"under verify {memory:.0f} MB"
        )


if __name__ == "__main__":
    main()
