"""Timed checkpoints in; a table for the terminal and JSON out."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.report.formats import megabytes_text, percent, rate_text, ratio_text, time_text
from paceline.report.tables import plain_table
from paceline.spec import CheckpointSpec
from paceline.spec.checkpoint_timing import CheckpointTimings
from paceline.words import number_of


def checkpoint_mapping(timings: CheckpointTimings) -> dict[str, Any]:
    """The result of `paceline bench checkpoint --json`: medians, every figure with its unit in its name."""
    return {
        "address": timings.request.address,
        "world_size": timings.world_size,
        "device_kind": timings.device_kind,
        "num_parameters": timings.request.num_parameters,
        "num_rounds": len(timings.stalls_s),
        "num_bytes": timings.num_bytes,
        "stall_s": timings.stall_s,
        "first_stall_s": timings.first_stall_s,
        "copy_s": timings.copy_s,
        "stall_over_copy": timings.stall_over_copy,
        "complete_s": timings.complete_s,
        "write_bytes_per_s": timings.num_bytes / timings.complete_s,
        "read_s": timings.read_s,
        "environment": dict(timings.environment),
    }


def checkpoint_table(timings: CheckpointTimings) -> RenderableType:
    """The stall of training, the background work, and their effect on a run."""
    n, rounds = timings.world_size, len(timings.stalls_s)
    figures = [
        ("training stalls", time_text(timings.stall_s), f"{ratio_text(timings.stall_over_copy)} a copy in memory"),
        ("the first time", time_text(timings.first_stall_s), "memory for the copy has to be found"),
        ("complete after", time_text(timings.complete_s), rate_text(timings.num_bytes / timings.complete_s)),
        ("read and checked", time_text(timings.read_s), rate_text(timings.num_bytes / timings.read_s)),
    ]
    return Group(
        Text(
            f"{timings.request.num_parameters:,} parameters with Adam's state, {megabytes_text(timings.num_bytes)} MB, "
            f"{number_of(n, 'worker')} ({timings.device_kind})",
            style="bold",
        ),
        Text(f"{timings.request.address}, median of {number_of(rounds, 'round')}"),
        plain_table(figures, right=(1,)),
        Text(f"\n{_meaning(timings)}", style="bold"),
    )


def _meaning(timings: CheckpointTimings) -> str:
    minutes = CheckpointSpec().every_minutes
    assert minutes is not None
    lost = percent(timings.stall_s / (60 * minutes), 2)
    if timings.complete_s > 60 * minutes:
        return (
            f"A checkpoint takes longer than the {minutes:g} minutes between two: the storage decides how often one is "
            f"kept, every {timings.complete_s / 60:.1f} minutes at best."
        )
    return f"A checkpoint every {minutes:g} minutes, the default, costs training {lost} of its time."
