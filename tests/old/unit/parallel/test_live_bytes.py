from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.parallel.live_bytes import LiveBytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_peak_of_a_pass(device: str) -> None:
    """Each linear layer's output, and ReLU's, which the second layer keeps too; then gradients take their place."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    inputs = torch.randn(100, 4, device=device)
    with LiveBytes() as live:
        model(inputs)
    # ReLU's input is freed when the second layer begins.
    assert live.peak_bytes == 4 * 100 * (8 + 8)


def test_what_was_there_before_and_what_is_ignored_do_not_count() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as live:
        before.add_(1)
        before.view(10, 100)
        assert live.peak_bytes == 0
        one = torch.ones(50)
        assert live.peak_bytes == 200
        live.ignore(one)
        assert live.peak_bytes == 0


def test_a_peak_begins_with_what_is_alive() -> None:
    with LiveBytes() as live:
        kept = torch.ones(10)
        torch.ones(1000)
        live.begin()
        torch.ones(5)
    assert live.peak_bytes == kept.nbytes + 20


def test_memory_that_is_freed_under_a_tensor() -> None:
    with LiveBytes(is_real=True) as live:
        shrinks, other = torch.ones(1000), torch.ones(10)
        shrinks.untyped_storage().resize_(0)
        other.add_(1)
        live.begin()
        other.add_(1)
        assert live.peak_bytes == other.nbytes
        shrinks.untyped_storage().resize_(4000)
        other.add_(1)
        assert live.peak_bytes == other.nbytes + 4000


def test_fake_tensors_pretend() -> None:
    with FakeTensorMode(), LiveBytes() as live:
        torch.ones(10**12)
    assert live.peak_bytes == 4 * 10**12
