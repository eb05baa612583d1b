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
from tests.ranks.harness import run_ranks
from torch import Tensor, nn

import paceline
from paceline import models
from paceline.data import ArraySet
from paceline.spec import Job, ModelSpec, Plan
from paceline.train.optim import build_optimizer

STEPS = 10
"""In a row with checkpoints, and as many without."""


def blocks_in_turn(num_blocks: int, folder: str) -> dict[str, list[float]]:
    """In each of two workers: LeNet on images like MNIST's, with a folder for checkpoints and without, in turn.

    None is due while the clock runs. Seconds of a block of steps, from when both workers were ready to both done.
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

    times: dict[str, list[float]] = {"with_s": [], "without_s": []}
    with paceline.init(job, plan=plan, checkpoint_dir=folder) as saved, paceline.init(job, plan=plan) as plain:
        runs = {"with_s": saved, "without_s": plain}
        batches = {}
        for name, run in runs.items():
            model = models.build(job.model, num_classes=10, in_channels=1, image_size=28)
            run.prepare(model, build_optimizer(job.optim, model))
            batches[name] = run.batches(train_set)
        for number in range(num_blocks + 1):
            # Whoever comes second finds other caches and other temperatures: they change places.
            for name in sorted(runs, reverse=bool(number % 2)):
                dist.barrier()
                began = time.perf_counter()
                for _ in range(STEPS):
                    runs[name].step(next(batches[name]), loss_fn)
                dist.barrier()
                times[name].append(time.perf_counter() - began)
    return {name: seconds[1:] for name, seconds in times.items()}


def agreement(num_blocks: int, scratch: Path) -> dict[str, Any]:
    """The time of a step with checkpoints over that without, none being due: the median of neighbouring blocks."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        times = run_ranks(blocks_in_turn, 2, num_blocks, folder, timeout_s=900)[0]
    ratios = [a / b for a, b in zip(times["with_s"], times["without_s"], strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "num_blocks": num_blocks,
        "with_ms": round(1e3 * statistics.median(times["with_s"]) / STEPS, 3),
        "without_ms": round(1e3 * statistics.median(times["without_s"]) / STEPS, 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_of_minima": round(min(times["with_s"]) / min(times["without_s"]), 4),
        "quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
        "num_steps": num_blocks * STEPS,
    }
