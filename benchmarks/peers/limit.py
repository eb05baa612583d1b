"""The limit: forward and backward on tensors that lie ready, in processes that never talk to each other.

Prints samples/s of this one process; start as many as there are workers and add them up.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.nn.functional as F

from paceline.train.allocator import keep_freed_memory
from peers.plain_ddp import lenet


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--keep-memory", action="store_true", help="with Paceline's allocator setting")
    arguments = parser.parse_args()
    if arguments.keep_memory:
        keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs, targets = (
        lenet(),
        torch.randn(arguments.batch, 1, 28, 28),
        torch.randint(0, 10, (arguments.batch,)),
    )
    if arguments.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=torch.channels_last)
    steps, began, end = 0, 0.0, 0.0
    while end - began < arguments.seconds:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.bf16):
            loss = F.cross_entropy(model(inputs).float(), targets)
        loss.backward()
        model.zero_grad()
        steps += 1
        if steps == 5:
            began = time.perf_counter()
        end = time.perf_counter() if steps >= 5 else 0.0
    print(json.dumps({"samples_per_s": (steps - 5) * arguments.batch / (end - began)}))


if __name__ == "__main__":
    main()
