"""The summary table at the end of a run: steps, metrics, throughput and the newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.spec import StepTime
from paceline.train.batches.data_progress import DataProgress
from paceline.train.records.progress import rate
from paceline.words import number_of

if TYPE_CHECKING:
    from paceline.train.run import Run


def end_rows(run: Run, progress: DataProgress, checkpoint: str | None) -> list[tuple[str, str]]:
    """The rows (name, value) of the table on rank 0; an empty list on other ranks, which print nothing.

    Args:
        checkpoint: the address of the newest checkpoint, or that there is none; None: the run saves none.
    """
    if run.rank != 0:
        return []
    done = progress.epochs_done
    epochs = f"epoch {progress.epoch + 1} of {progress.num_epochs}" if done is None else number_of(done, "epoch")
    steps = f"{progress.steps:,} in {epochs}, {number_of(progress.samples_seen, 'sample')}"
    rows = [("steps", steps), ("workers", f"{number_of(run.world_size, 'worker')}, {run.device.type}")]
    if run.metrics:
        rows.append(("evaluated", shown_metrics(run.metrics)))
    rows += run.display.rows.items()
    if run.stopping.reason is not None:
        rows.append(("stopped", run.stopping.reason))
    step_time = run.timer.median()
    if run.timer.train_s:
        rows.append(("speed", f"{rate(samples_per_s(run))} samples/s"))
        rows.append(("time", f"{run.timer.train_s:.1f} s of training{_shares(step_time)}"))
    if checkpoint is not None:
        rows.append(("checkpoint", checkpoint))
    return rows


def samples_per_s(run: Run) -> float:
    """Steady throughput over all workers: as `RunRecord.samples_per_s`."""
    step_time = run.timer.median()
    # Where workers synchronise every few steps, the median step is one without a synchronisation.
    if step_time.total_s and run.job.aggregation.method == "every_step":
        return min(run.job.global_batch_size, run.samples_seen) / step_time.total_s
    return run.samples_seen / run.timer.train_s if run.timer.train_s else 0.0


def _shares(step_time: StepTime) -> str:
    """Where the median step's time went."""
    parts = {
        "compute": step_time.compute_s,
        "data": step_time.data_s,
        "waiting for others": step_time.exposed_comm_s,
    }
    total = sum(parts.values())
    shown = [f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if total and seconds >= 0.005 * total]
    return f": {', '.join(shown)}" if shown else ""


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics as people read them."""
    return "  ".join(
        f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4f}" for name, value in metrics.items()
    )
