"""Streams: torch's CUDA sanitizer, fed by the simulated device, finds work that no event orders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.cuda import _sanitizer
from torch.utils.data import IterableDataset

import paceline
from paceline.data import ArrayReader, ArraySet, Augmentation
from tests.kit.sim_gpu.observing import Observer
from tests.kit.sim_gpu.workers import run_on_gpus
from tests.old.sim_gpu.cells import Cell

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


def test_batches_are_made_on_the_device_as_on_the_host_and_the_host_waits_for_none(simulated_gpu: Path) -> None:
    run_on_gpus(simulated_gpu, _batches, 1)


def _batches(native: Any) -> None:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (40, 3, 12, 12), dtype=np.uint8), rng.integers(0, 10, 40)
    augmentation = Augmentation(crop_padding=2, flip=True, cutout_size=4)
    images = ArraySet(pixels, labels, 10, (0.5, 0.4, 0.6), (0.2, 0.3, 0.2), augmentation)
    numbers = np.array([3, 39, 3, 17, 0])
    expected = ArrayReader(images, torch.device("cpu"), torch.float32, True, 7).read(2, numbers, train=True)
    reader = ArrayReader(images, torch.device("cuda", 0), torch.float32, True, 7)
    for resident in (reader._resident, None):
        reader._resident = resident
        with Observer(native) as seen:
            batch = reader.read(2, numbers, train=True)
        assert seen.count("host_to_device", "pageable") == 0, seen.table("host_to_device")
        for on_device, on_host in zip(batch, expected, strict=True):
            assert torch.equal(on_device.cpu(), on_host)
    _sanitizer.enable_cuda_sanitizer()
    _train_on_a_stream(native)


class _Numbers(IterableDataset[Tensor]):
    """Notes on which of the device's streams it is read."""

    def __init__(self) -> None:
        self.streams: set[int] = set()

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(40):
            self.streams.add(torch.cuda.current_stream().stream_id)
            yield torch.full((4,), float(number))


def _train_on_a_stream(native: Any) -> None:
    numbers = _Numbers()
    with paceline.init(global_batch_size=8, virtual_shards=2, optim={"lr": 0.01}) as run:
        model = nn.Linear(4, 1)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        with Observer(native) as seen:
            for batch in run.batches(numbers):
                run.step(batch, lambda model, batch: model(batch).square().mean())
    assert run.steps == 5
    of_batches = [act for act in seen.acts if act.kind == "host_to_device" and "containers" in act.where]
    assert {act.detail for act in of_batches} == {"pinned"}, seen.table("host_to_device")
    assert 0 not in numbers.streams
