"""Run folders as training leaves them while it runs."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from paceline.spec import Job
from paceline.spec.codec import to_mapping
from paceline.spec.run_status import STATUS_FILE, RunStatus, WorkerStatus


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_status(
    folder: Path,
    step: int,
    at: float | None = None,
    processor_s: float = 1.0,
    nodes: tuple[str, str] = ("node0", "node1"),
) -> None:
    """Two workers on two nodes; the second waits for the first."""
    workers = tuple(
        WorkerStatus(
            rank=rank,
            node=nodes[rank],
            pid=100 + rank,
            step=step,
            doing=doing,
            is_waiting=bool(rank),
            memory_bytes=300_000_000 + rank,
            processor_s=processor_s,
        )
        for rank, doing in enumerate(
            ["in no collective so far", "in all_reduce number 7 of group default_pg for 0.2 s"]
        )
    )
    status = RunStatus(time.time() if at is None else at, workers)
    (folder / STATUS_FILE).write_text(json.dumps(to_mapping(status)), encoding="utf-8")


def make_live_run(folder: Path, num_steps: int = 120, **job: Any) -> Path:
    """A run of two workers that has made `num_steps` steps and was evaluated once."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(Job(**job).to_mapping()), encoding="utf-8")
    write_lines(
        folder,
        [{"step": step, "loss": 2 * math.exp(-step / 80), "samples_seen": 64 * step} for step in range(1, num_steps)],
    )
    timing = {
        "samples_per_s": 1500.0,
        "step_total_s": 0.04,
        "step_data_s": 0.004,
        "step_compute_s": 0.03,
        "step_exposed_comm_s": 0.006,
    }
    now = time.time()
    write_lines(
        folder,
        [
            {"step": num_steps // 2, "time": now, **timing},
            {"step": num_steps, "loss": 0.5, "samples_seen": 64 * num_steps},
            {"step": num_steps, "time": now, **timing, "samples_per_s": 1600.0},
            {"step": num_steps, "time": now, "epoch": 1, "train_loss": 0.5, "test_accuracy": 0.91, "test_loss": 0.4},
        ],
    )
    write_status(folder, num_steps)
    return folder
