"""A script of a user's, whose second worker fails before its fourth step in the way that the argument names."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.arange(5.0) * (index - 10) / 10
        return inputs, inputs.sum().sin()


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs)[:, 0], targets)


def fail(fault: str, rank: int) -> None:
    if fault == "other-groups":
        groups = [dist.new_group(), dist.new_group()]
        dist.all_reduce(torch.ones(3), group=groups[rank])
    if rank == 0 and fault in ("exits-in-order", "system-exit"):
        time.sleep(60)  # a worker that takes its time to end might else be noticed by its peer first
    if rank != 1:
        return
    match fault:
        case "raises":
            raise ValueError("no such label: 11")
        case "exits":
            os._exit(3)
        case "exits-in-order":
            sys.exit(3)
        case "system-exit":
            raise SystemExit("not today")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "aborts":
            os.abort()
        case "hangs":
            time.sleep(600)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "other-collective":
            dist.all_reduce(torch.ones(3))


def main() -> None:
    with paceline.init(global_batch_size=8, virtual_shards=4, epochs=2, seed=3, parity="bitwise") as run:
        net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for epoch in run.epochs():
            for batch in run.batches(Points(), epoch):
                if run.steps == 3:
                    fail(sys.argv[1], run.rank)
                run.step(batch, loss_fn)
        print(run.steps, "steps", run.weights_sha256())


if __name__ == "__main__":
    main()
