"""The limit: forward and backward on tensors that lie ready, in processes that never talk to each other.

Prints samples/s of this one process; start as many as there are workers and add them up. With --ddp, started by
torchrun, the processes are tied by DistributedDataParallel and step an optimizer: what numeric parity must not cost
more than.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.train.process.memory import keep_freed_memory
from peers.plain_ddp import lenet

WARMUP_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--keep-memory", action="store_true", help="with Paceline's allocator setting")
    parser.add_argument("--ddp", action="store_true", help="with DistributedDataParallel and SGD, under torchrun")
    arguments = parser.parse_args()
    if arguments.keep_memory:
        keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = lenet()
    inputs = torch.randn(arguments.batch, 1, 28, 28)
    targets = torch.randint(0, 10, (arguments.batch,))
    if arguments.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=torch.channels_last)
    if arguments.ddp:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(WARMUP_STEPS + arguments.steps):
        if step == WARMUP_STEPS:
            began = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.bf16):
            loss = F.cross_entropy(model(inputs).float(), targets)
        loss.backward()
        if arguments.ddp:
            optimizer.step()
        optimizer.zero_grad()
    rate = arguments.steps * arguments.batch / (time.perf_counter() - began)
    if not arguments.ddp:
        print(json.dumps({"samples_per_s": rate}))
    elif dist.get_rank() == 0:
        print(json.dumps({"samples_per_s": rate * dist.get_world_size()}))


if __name__ == "__main__":
    main()
