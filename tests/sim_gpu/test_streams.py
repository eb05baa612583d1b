"""Streams: torch's CUDA sanitizer, fed by the simulated device, finds work that no event orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _sanitizer

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
