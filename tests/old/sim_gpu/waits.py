"""What the host waits for in a step, after the first ones, by way to train.

python -m tests.old.sim_gpu.waits          # prints a table
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import paceline
from paceline import models
from paceline.env import worker_facts
from paceline.spec import Job, Plan, parse_mesh
from paceline.train.optimizers.optim import build_optimizer
from tests.kit.sim_gpu.build import build
from tests.kit.sim_gpu.observing import Observer
from tests.kit.sim_gpu.workers import run_on_gpus
from tests.old.ranks.training import images, loss_fn

FIRST_STEPS, COUNTED_STEPS = 4, 2
"""Steps that are not looked at, in which everything is made, and those whose waits are counted."""
_JOB = {"global_batch_size": 16, "virtual_shards": 4, "optim": {"lr": 0.01, "momentum": 0.9}}
_LATE = "event.synchronize"
"""Of a step before, which is followed by another step's work in the device's queue: it is not idle meanwhile."""
_STEPS_OF_REST = 2
"""The end of an epoch lies behind the counted steps."""


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    job: dict[str, Any] = field(default_factory=dict)
    mesh: str | None = None
    devices_in_process: int = 1

    def waits(self, native: Any) -> dict[str, int]:
        """What the host of this worker waits for in the counted steps: how often, by the project's line."""
        job = Job.from_mapping(_JOB | {"model": "lenet"} | self.job)
        shape = (3, 8, 8) if job.model.name == "resnet20" else (1, 28, 28)
        world_size = worker_facts().world_size
        algorithm = "tree_exact" if job.parity == "bitwise" else "all_reduce"
        mesh = None if self.mesh is None else parse_mesh(self.mesh, world_size, 1)
        plan = Plan(
            world_size,
            mesh=mesh,
            algorithm=algorithm,  # type: ignore[arg-type]
            timeout_s=120,
            device_kind="cuda",
            devices_in_process=self.devices_in_process,
        )
        steps = FIRST_STEPS + COUNTED_STEPS + _STEPS_OF_REST
        observer = Observer(native)
        # The progress line reads the loss whenever some seconds have passed.
        with paceline.init(job, plan=plan, max_steps=steps, progress=False) as run:
            model = models.build(job.model, num_classes=10, in_channels=shape[0], image_size=shape[-1])
            example = None
            data = images(16 * steps, shape)
            if run.mesh.pp > 1:
                example = next(iter(run.reader.read(data, 0, [np.arange(2)], train=False)))[0]
            run.prepare(model, build_optimizer(job.optim, model), example=example)
            for batch in run.batches(data):
                if run.steps == FIRST_STEPS:
                    observer.__enter__()
                run.step(batch, loss_fn)
                if run.steps == FIRST_STEPS + COUNTED_STEPS:
                    observer.__exit__(None, None, None)
        found: Counter[str] = Counter()
        for act, number in observer.acts.items():
            if act.kind == "synchronisation" and act.detail != _LATE:
                found[f"{act.detail} {act.where}"] += number
        return dict(found)


def _sum(method: str, **more: Any) -> dict[str, Any]:
    return {"aggregation": {"method": method, **more}}


def ways(num_gpus: int) -> list[Way]:
    """Those that so many GPUs can train in."""
    found = [
        Way("numeric"),
        Way("bitwise", {"parity": "bitwise"}),
        Way("batch norm of shards", {"model": "resnet20"}),
        Way("bitwise, AdamW", {"parity": "bitwise", "optim": {"name": "adamw", "lr": 0.01}}),
        Way("bitwise, batch norm of shards", {"model": "resnet20", "parity": "bitwise"}),
        Way("float16", {"precision": "float16"}),
        Way("bfloat16", {"precision": "bfloat16"}),
        Way("gradient clipping", {"optim": {"lr": 0.01, "clip_norm": 1.0}}),
        Way("noise scale", {"measure_noise": True}),
    ]
    if num_gpus == 1:
        return [*found, Way("one process, two devices", devices_in_process=2)]
    found += [
        Way("local_sgd", _sum("local_sgd", sync_every=2)),
        Way("diloco", _sum("diloco", sync_every=2)),
        Way("fsdp", mesh="fsdp"),
        Way("tp", mesh="tp"),
        Way("pp", mesh="pp"),
    ]
    if num_gpus == 4:
        return [Way("hsdp", mesh="hsdp"), Way("dp2 x tp2", mesh="dp2 x tp2")]
    return found


def count(native: Any, num_gpus: int, names: Sequence[str] | None = None) -> dict[str, dict[str, int]]:
    """The waits of every way, on this worker."""
    return {way.name: way.waits(native) for way in ways(num_gpus) if names is None or way.name in names}


def main() -> None:
    """Print a table for rank 0 of so many simulated GPUs."""
    library, step = build(), COUNTED_STEPS
    for num_gpus in map(int, sys.argv[1:] or ["1", "2", "4"]):
        found = run_on_gpus(library, count, num_gpus, num_gpus, num_gpus=max(2, num_gpus), timeout_s=500)[0]
        for name, waits in found.items():
            where = ", ".join(f"{number / step:g} {what}" for what, number in waits.items())
            print(f"| {num_gpus} | {name} | {sum(waits.values()) / step:g} | {where} |", flush=True)


if __name__ == "__main__":
    main()
