"""Run records as a scaling study on a small machine leaves them, made by formulas instead of training."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from paceline.spec import Job, Plan, RunRecord, StepTime
from paceline.spec.record import EpochRecord

ENVIRONMENT = {
    "paceline": "0.1.0",
    "python": "3.11.2",
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "platform": "Linux-6.1.0-x86_64-with-glibc2.36",
    "cpu": "AMD EPYC 7B13, 4 cores",
    "memory": "15.6 GiB",
    "git_commit": "3f9c1ab27d0e4c55a1f0be72a7d8c9e01b2c3d4e",
}
TRAIN_SAMPLES = 1437


def sample_job(**changes: Any) -> Job:
    job = Job.from_mapping(
        {
            "name": "digits-lenet",
            "global_batch_size": 64,
            "virtual_shards": 4,
            "epochs": 12,
            "model": "lenet",
            "data": "digits",
            "optim": {"lr": 0.05, "momentum": 0.9, "schedule": "cosine", "warmup_epochs": 1.0},
        }
    )
    return job.with_values(**changes)


def sample_record(devices: int = 1, seed: int = 0, job: Job | None = None, **changes: Any) -> RunRecord:
    """One run. `changes` replace fields of the record; `accuracy=None` also drops it from every epoch."""
    job = (job or sample_job()).with_values(seed=seed)
    # What differs between device counts under numeric parity, and does not under bitwise parity.
    rounding = 0.0 if job.parity == "bitwise" else math.log2(devices)
    accuracy = changes.pop("accuracy", 0.978 + 0.002 * math.sin(1.7 * seed) - 0.0004 * rounding)
    steps_an_epoch = math.ceil(TRAIN_SAMPLES / job.global_batch_size)
    # Compute divides by the devices; what gradients cost grows with them and hides less and less.
    compute_s = 0.0172 * (job.global_batch_size / 64) / devices * (1 + 0.01 * seed)
    data_s = 0.0009 * (job.global_batch_size / 64) / devices
    comm_s = 0.0 if devices == 1 else 0.0004 + 0.0016 * math.log2(devices)
    total_s = compute_s + data_s + comm_s
    epoch_s = total_s * steps_an_epoch * (1 + 0.02 * math.cos(seed))
    epochs = tuple(
        EpochRecord(
            epoch=epoch,
            train_loss=2.1 * math.exp(-0.75 * epoch) * (1 + 0.05 * math.sin(seed + epoch + rounding)) + 0.03,
            lr=job.optim.lr * 0.5 * (1 + math.cos(math.pi * epoch / job.epochs)),
            train_s=epoch_s,
            metrics={"loss": 1.5 * math.exp(-0.6 * epoch) + 0.09}
            | ({} if accuracy is None else {"accuracy": accuracy * (1 - 0.55 * math.exp(-0.8 * epoch))}),
        )
        for epoch in range(1, job.epochs + 1)
    )
    values: dict[str, Any] = {
        "job": job,
        "plan": Plan(world_size=devices, algorithm="tree_exact" if job.parity == "bitwise" else "all_reduce"),
        "steps": steps_an_epoch * job.epochs,
        "samples_seen": TRAIN_SAMPLES * job.epochs,
        "accuracy": accuracy,
        "loss": epochs[-1].metrics["loss"],
        "train_loss": epochs[-1].train_loss,
        "train_s": epoch_s * job.epochs,
        "wall_s": epoch_s * job.epochs + 3.1 + 0.6 * devices,
        "time_to_first_step_s": 2.2 + 0.35 * devices,
        "samples_per_s": job.global_batch_size / total_s,
        "step_time": StepTime(total_s, data_s, compute_s, comm_s),
        "step_p10_s": 0.94 * total_s,
        "step_p90_s": 1.12 * total_s,
        "weights_sha256": hashlib.sha256(f"{seed}/{rounding}".encode()).hexdigest(),
        "epochs": epochs,
        "environment": ENVIRONMENT,
    }
    return RunRecord(**(values | changes))


def sample_study_records(
    devices: Sequence[int] = (1, 2, 4), seeds: Sequence[int] = (0, 1, 2), job: Job | None = None
) -> list[RunRecord]:
    """A study at fixed global batch; with `parity = "bitwise"` in `job` device counts agree to the bit."""
    job = job or sample_job()
    return [sample_record(count, seed, job) for count in devices for seed in seeds]


def sample_grown_records(devices: Sequence[int] = (1, 2, 4), seeds: Sequence[int] = (0, 1, 2)) -> list[RunRecord]:
    """A study at fixed batch per device, in which the largest batch costs accuracy."""
    return [
        sample_record(
            count,
            seed,
            sample_job().grown(count),
            accuracy=0.978 + 0.002 * math.sin(1.7 * seed) - 0.0045 * (count - 1),
            notes=() if count == 1 else (f"Learning rate scaled {count}x to {0.05 * count:g} with the batch.",),
        )
        for count in devices
        for seed in seeds
    ]
