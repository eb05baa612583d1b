"""Timestamps in a step, taken without synchronising the CPU with the device."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """Now, as a CUDA event on a GPU, else by the wall clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(begin: Mark, end: Mark) -> float:
    """Seconds between two marks; on CUDA waits until the device has passed `end`."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
