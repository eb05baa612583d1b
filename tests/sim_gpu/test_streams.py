"""Streams: torch's CUDA sanitizer, fed by the simulated device, finds work that no event orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _sanitizer

from tests.sim_gpu.cells import Cell
from tests.sim_gpu.workers import run_on_gpus

pytestmark = pytest.mark.sim_gpu


def test_a_missing_wait_between_streams_is_found(simulated_gpu: Path) -> None:
    run_on_gpus(simulated_gpu, _streams, 1)


def _streams(native: Any) -> None:
    _sanitizer.enable_cuda_sanitizer()
    value = torch.zeros(4, device="cuda")
    side = torch.cuda.Stream()

    def add_one() -> None:
        with torch.cuda.stream(side):
            value.add_(1)

    side.wait_stream(torch.cuda.current_stream())
    add_one()
    torch.cuda.current_stream().wait_stream(side)
    value.mul_(2)
    with pytest.raises(_sanitizer.CUDASanitizerErrors):
        add_one()


@pytest.mark.slow
def test_a_step_of_data_parallelism_orders_its_streams(simulated_gpu: Path) -> None:
    """Buckets are summed on a stream of their own; without its waits the sanitizer stops the step."""
    run_on_gpus(simulated_gpu, _data_parallel, 2)


def _data_parallel(native: Any) -> None:
    _sanitizer.enable_cuda_sanitizer()
    cell = Cell("ring", plan={"algorithm": "ring"})
    cell.train("cuda", max_steps=2)
    stream: Any = torch.cuda.Stream
    stream.wait_event = lambda self, event: None
    with pytest.raises(_sanitizer.CUDASanitizerErrors):
        cell.train("cuda", max_steps=2)
