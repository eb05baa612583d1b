"""Trains until somebody stops it; a worker fails in the way it is told to, once the file `go` is there.

    faulty.py STAGE RANK WAY

Every worker leaves its pid in STAGE/RANK.pid, and STAGE/RANK.steps when it has done some steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # an optimizer loads it at its first step: seconds that a busy machine makes a hang
from torch.utils.data import TensorDataset

import paceline
from paceline.spec import Plan

STEPS_BEFORE = 5
LIMIT_S = 300.0


def fail(way: str) -> None:
    if way == "raise":
        raise ValueError("no such label: 11")
    if way == "hang":
        while True:
            pass
    if way == "exhaust":
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20) * 16))


def main() -> None:
    stage, culprit, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    draw = torch.Generator().manual_seed(0)  # every worker must hold the same samples
    data = TensorDataset(torch.randn(64, 8, generator=draw), torch.randn(64, 1, generator=draw))
    began = time.monotonic()
    plan = Plan(algorithm="ring", timeout_s=120)
    with paceline.init(plan=plan, global_batch_size=8, virtual_shards=8, epochs=1_000_000) as run:
        model = torch.nn.Linear(8, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        (stage / f"{run.rank}.pid").write_text(str(os.getpid()))
        for batch in run.batches(data):
            run.step(batch, lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
            if run.steps == STEPS_BEFORE:
                (stage / f"{run.rank}.steps").touch()
            if run.rank == culprit and run.steps >= STEPS_BEFORE and (stage / "go").exists():
                (stage / "gone").write_text(repr(time.time()))
                fail(way)
            time.sleep(0.01)
            assert time.monotonic() - began < LIMIT_S


if __name__ == "__main__":
    main()
