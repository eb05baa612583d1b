"""What a reader is told of timed checkpoints."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from paceline.report.checkpoint_bench import checkpoint_mapping, checkpoint_table
from paceline.spec.checkpoint_timing import CheckpointRequest, CheckpointTimings
from paceline.spec.codec import to_mapping

TIMINGS = CheckpointTimings(
    request=CheckpointRequest("/place/bench-1", 100_000_000, 3),
    world_size=2,
    device_kind="cpu",
    num_bytes=1_200_000_000,
    first_stall_s=1.5,
    stalls_s=(0.6, 0.9, 0.5),
    copies_s=(0.5, 0.45, 0.5),
    completes_s=(6.0, 5.0, 4.0),
    reads_s=(2.0, 2.0, 2.0),
)


def _shown(timings: CheckpointTimings) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(checkpoint_table(timings))
    return console.export_text()


def test_the_table_says_what_a_run_would_lose() -> None:
    text = _shown(TIMINGS)
    assert "100,000,000 parameters with Adam's state, 1200 MB, 2 workers (cpu)" in text
    assert "600 ms" in text
    assert "1.20x a copy in memory" in text
    assert "240 MB/s" in text
    assert "A checkpoint every 2 minutes, the default, costs training 0.50 % of its time." in text


def test_a_storage_slower_than_the_interval_is_said() -> None:
    text = _shown(replace(TIMINGS, completes_s=(150.0, 150.0, 150.0)))
    assert "every 2.5 minutes at best" in text
    assert "costs training" not in text


def test_figures_are_medians_and_ratios_are_taken_round_by_round() -> None:
    figures = checkpoint_mapping(TIMINGS)
    assert figures["stall_s"] == 0.6
    assert figures["stall_over_copy"] == pytest.approx(1.2)
    assert figures["write_bytes_per_s"] == 1_200_000_000 / 5.0


def test_timings_survive_their_file() -> None:
    assert CheckpointTimings.from_mapping(to_mapping(TIMINGS)) == TIMINGS
