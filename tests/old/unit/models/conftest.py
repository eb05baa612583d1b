from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.old.unit.threads import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def a_seed() -> Iterator[None]:
    """Every test computes from the same draws, and leaves the process as it found it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
