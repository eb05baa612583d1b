"""What it costs at every step that workers agree on when to save."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.nn.functional as F
from tests.kit.workers import run_ranks
from torch import Tensor, nn

import paceline
from paceline import models
from paceline.data import ArraySet
from paceline.env import worker_facts
from paceline.spec import Job, ModelSpec, Plan
from paceline.train.optimizers.optim import build_optimizer
from paceline.train.process.process_group import join
from paceline.train.session.status_exchange import StatusExchange

from .cost import Seconds

STEPS = 10
"""In a row with checkpoints, and as many without."""
CALLS = 2000


def blocks_in_turn(num_blocks: int, folder: str) -> dict[str, list[Seconds]]:
    """In each of two workers: LeNet on images like MNIST's, with a folder for checkpoints and without, in turn.

    None is due while the clock runs. Of a block of steps, from when both workers were ready until both are done.
    """
    draw = np.random.default_rng(0)
    train_set = ArraySet(
        draw.integers(0, 256, (256 * STEPS, 1, 28, 28), dtype=np.uint8),
        draw.integers(0, 10, 256 * STEPS),
        10,
        (0.5,),
        (0.25,),
        None,
    )
    job = Job(global_batch_size=256, epochs=num_blocks + 1, model=ModelSpec("lenet")).with_values(
        channels_last=True, checkpoint={"every_minutes": 1e6, "every_epoch": False}
    )
    plan = Plan(world_size=2, algorithm="all_reduce", timeout_s=60)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    times: dict[str, list[Seconds]] = {"with": [], "without": []}
    with paceline.init(job, plan=plan, checkpoint_dir=folder) as saved, paceline.init(job, plan=plan) as plain:
        runs = {"with": saved, "without": plain}
        batches = {}
        for name, run in runs.items():
            model = models.build(job.model, num_classes=10, in_channels=1, image_size=28)
            run.prepare(model, build_optimizer(job.optim, model))
            batches[name] = run.batches(train_set)
        for number in range(num_blocks + 1):
            # Whoever comes second finds other caches and other temperatures: they change places.
            for name in sorted(runs, reverse=bool(number % 2)):
                dist.barrier()
                clock, processor = time.perf_counter(), time.process_time()
                for _ in range(STEPS):
                    runs[name].step(next(batches[name]), loss_fn)
                dist.barrier()
                times[name].append(Seconds(time.perf_counter() - clock, time.process_time() - processor))
    return {name: seconds[1:] for name, seconds in times.items()}


def calls_alone() -> float:
    """In each of two workers: processor seconds of one agreement, all threads of a worker, nothing being computed."""
    facts = worker_facts()
    join(facts, Plan(world_size=facts.world_size, timeout_s=60))
    exchange = StatusExchange(dist.group.WORLD)
    began = 0.0
    for number in range(-100, CALLS):
        if number == 0:
            began = time.process_time()
        exchange.received()
        exchange.send(set(), 0.1)
    exchange.received()
    return (time.process_time() - began) / CALLS


def agreement(num_blocks: int, scratch: Path) -> dict[str, Any]:
    """A step with checkpoints, none being due, over one without: medians over neighbouring blocks.

    By the clock, and by what the processor did for rank 0, which others on the machine change less; and by what the
    agreement alone needs of it.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        times = run_ranks(blocks_in_turn, 2, num_blocks, folder, timeout_s=900)[0]
    row: dict[str, Any] = {"num_blocks": num_blocks, "num_steps": num_blocks * STEPS}
    for kind in ("clock", "processor"):
        seconds = {name: [getattr(block, f"{kind}_s") for block in blocks] for name, blocks in times.items()}
        ratios = [mine / other for mine, other in zip(seconds["with"], seconds["without"], strict=True)]
        for name, blocks in seconds.items():
            row[f"{kind}_{name}_ms"] = round(1e3 * statistics.median(blocks) / STEPS, 3)
        row[f"{kind}_ratio"] = round(statistics.median(ratios), 4)
        row[f"{kind}_quartiles"] = [round(quarter, 4) for quarter in statistics.quantiles(ratios, n=4)[::2]]
    alone_s = max(run_ranks(calls_alone, 2))
    row["alone_ms"] = round(1e3 * alone_s, 3)
    row["alone_over_step"] = round(1e3 * alone_s / row["processor_without_ms"], 4)
    return row
