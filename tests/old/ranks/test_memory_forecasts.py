"""What workers hold at most is what the planner's formulas say: a small network on meshes of four workers.

How much tensors hold depends on no clock and on no neighbour.
"""

from __future__ import annotations

import importlib

import pytest

from paceline.spec import parse_mesh
from tests.kit.workers import run_ranks

memory_forecasts = importlib.import_module("benchmarks.memory_forecasts")

WORKERS = 4
CLOSE = 0.1
COLUMNS = [memory_forecasts.Column(strategy) for strategy in ("zero2", "fsdp", "hsdp")]


def test_peaks_are_those_of_the_forecast() -> None:
    case = memory_forecasts.CASES["lenet"]
    cost = memory_forecasts.traced(case)
    forecasts = [memory_forecasts.forecast(cost, parse_mesh(one.strategy, WORKERS), one) for one in COLUMNS]
    wanted = [
        (case, column, memory_forecasts.cuts_of(memory), None)
        for column, memory in zip(COLUMNS, forecasts, strict=True)
    ]
    found = run_ranks(memory_forecasts.held_by_each, WORKERS, wanted, timeout_s=240)
    measured = [max(one.peak for one in of_workers) for of_workers in zip(*found, strict=True)]
    assert [memory.total_bytes for memory in forecasts] == [pytest.approx(peak, rel=CLOSE) for peak in measured]
