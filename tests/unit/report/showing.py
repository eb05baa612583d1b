"""Studies of made-up runs, and what a terminal or a browser shows of them."""

from __future__ import annotations

import hashlib
import io
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

import paceline
from paceline.report.study import Study
from paceline.spec import Job, Plan, RunRecord
from paceline.spec.record import EpochRecord, StepTime

ENVIRONMENT = {
    "paceline": "0.1.0",
    "torch": "2.13.0+cpu",
    "cpu": "AMD EPYC 7B13, 4 cores",
    "git_commit": "3f9c1ab27d0e",
}


def job_of(**changes: Any) -> Job:
    optim = {"lr": 0.05, "schedule": "cosine", "warmup_epochs": 1.0}
    known = {"name": "digits-lenet", "global_batch_size": 64, "virtual_shards": 4, "epochs": 4, "optim": optim}
    return Job.from_mapping(known).with_values(**changes)


def record_of(devices: int = 1, seed: int = 0, job: Job | None = None, **changes: Any) -> RunRecord:
    """A run whose compute divides by the devices and whose sums do not; `changes` replace fields of the record."""
    job = (job or job_of()).with_values(seed=seed)
    # What differs between device counts under numeric parity, and does not under bitwise parity.
    rounding = 0.0 if job.parity == "bitwise" else math.log2(devices)
    accuracy = changes.pop("accuracy", 0.978 + 0.002 * math.sin(1.7 * seed) - 0.0004 * rounding)
    steps = math.ceil(1437 / job.global_batch_size)
    compute_s = 0.0172 * (job.global_batch_size / 64) / devices * (1 + 0.01 * seed)
    comm_s = 0.0 if devices == 1 else 0.0004 + 0.0016 * math.log2(devices)
    total_s = compute_s + 0.001 + comm_s
    epochs = tuple(
        EpochRecord(
            epoch,
            train_loss=2.1 * math.exp(-0.75 * epoch),
            lr=0.05,
            train_s=total_s * steps,
            metrics={"loss": 1.5 * math.exp(-0.6 * epoch)} | ({} if accuracy is None else {"accuracy": accuracy}),
        )
        for epoch in range(1, job.epochs + 1)
    )
    values: dict[str, Any] = {
        "job": job,
        "plan": Plan(world_size=devices),
        "steps": steps * job.epochs,
        "samples_seen": 1437 * job.epochs,
        "accuracy": accuracy,
        "loss": 0.1,
        "train_loss": 0.2,
        "train_s": total_s * steps * job.epochs,
        "wall_s": total_s * steps * job.epochs + 3,
        "time_to_first_step_s": 2.0,
        "samples_per_s": job.global_batch_size / total_s,
        "step_time": StepTime(total_s, 0.001, compute_s, comm_s),
        "weights_sha256": hashlib.sha256(f"{seed}/{rounding}".encode()).hexdigest(),
        "epochs": epochs,
        "environment": ENVIRONMENT,
    }
    return RunRecord(**(values | changes))


def records_of(
    devices: Sequence[int] = (1, 2, 4), seeds: Sequence[int] = (0, 1, 2), job: Job | None = None
) -> list[RunRecord]:
    """A study at a fixed global batch."""
    return [record_of(count, seed, job) for count in devices for seed in seeds]


def grown_records(devices: Sequence[int] = (1, 2, 4), seeds: Sequence[int] = (0, 1, 2)) -> list[RunRecord]:
    """A study at a fixed batch a device, in which the largest batch costs accuracy."""
    return [
        record_of(
            count,
            seed,
            job_of().scaled_for(count),
            accuracy=0.978 + 0.002 * math.sin(1.7 * seed) - 0.0045 * (count - 1),
            notes=() if count == 1 else (f"Learning rate scaled {count}x to {0.05 * count:g} with the batch.",),
        )
        for count in devices
        for seed in seeds
    ]


def study_of(records: Sequence[RunRecord], *, out: Path | None = None, **limits: float) -> Study:
    """The study of runs that lie in folders."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / f"run-{place}" for place in range(len(records))]
        for folder, record in zip(folders, records, strict=True):
            folder.mkdir()
            record.save(folder / "record.json")
        return paceline.report(folders, out=out, **limits)


def terminal(shown: RenderableType, width: int) -> str:
    """What a pipe of this width gets."""
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(shown)
    return out.getvalue()
