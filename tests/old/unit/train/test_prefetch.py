"""The order in which a GPU's streams get to see batches that are read ahead, noted by stand-ins for streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.train.batches import prefetch
from paceline.train.batches.prefetch import ahead

GPU = torch.device("cuda", 0)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def stream(name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: seen.append(f"{name} waits for {other.name}"))

    computing, side = stream("computing"), stream("side")

    @contextlib.contextmanager
    def on(one: Any) -> Iterator[None]:
        seen.append(f"on {one.name}")
        yield
        seen.append("off")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: computing)
    monkeypatch.setattr(torch.cuda, "stream", on)
    batch = SimpleNamespace(is_cuda=True, record_stream=lambda one: seen.append(f"kept for {one.name}"))
    monkeypatch.setattr(prefetch, "tensors", lambda _content: [batch])
    return seen


def test_a_batch_is_read_while_the_one_before_is_trained_on(events: list[str]) -> None:
    def read() -> Iterator[int]:
        for number in range(2):
            events.append(f"read {number}")
            yield number

    for number in ahead(read(), GPU):
        events.append(f"train {number}")
    reading = ["on side", "read {}", "off"]
    taken = ["computing waits for side", "kept for computing"]
    assert events == [
        "side waits for computing",
        *[event.format(0) for event in reading],
        *taken,
        *[event.format(1) for event in reading],
        "train 0",
        *taken,
        "on side",
        "train 1",
    ]


@pytest.mark.usefixtures("events")
def test_an_error_comes_in_its_place() -> None:
    def read() -> Iterator[int]:
        yield 0
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        for number in ahead(read(), GPU):
            seen.append(number)
    assert seen == [0]


def test_on_a_cpu_nothing_is_read_ahead() -> None:
    numbers = iter(range(3))
    assert next(ahead(numbers, torch.device("cpu"))) == 0
    assert next(numbers) == 1
