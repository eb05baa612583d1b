"""Batches of a stream, read in a loader process if the loader has any."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.containers import to_device
from paceline.data import random_streams
from paceline.data.generators import global_generators_kept, seed_global_generators
from paceline.data.loading import Loading
from paceline.data.sample_reader import CARRIED_ERRORS, collated, loaded, loader_settings, shard_key
from paceline.data.substreams import StreamPosition, Substreams


@dataclass(frozen=True)
class StreamStep:
    """What one worker reads of a stream for one global batch."""

    sizes: dict[int, int]
    """How many samples each of its substreams gave."""
    contents: list[Any]
    """With a collate function: what it made of each substream's samples, where there are any; else one entry: all
    samples collated together, or None for none."""
    states: dict[str, Any]
    """The stream's own states after this step, by substream, where it has any."""
    fingerprint: int
    """The fingerprint of all workers' samples so far, where this worker reads them all; else 0."""


def read_stream(
    loading: Loading,
    own: Sequence[int],
    global_batch_size: int,
    position: StreamPosition,
    *,
    seed: int,
    epoch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[StreamStep]:
    """The steps of an epoch from `position` on, endless: those after the end are empty.

    Args:
        own: the numbers of this worker's substreams.

    Raises:
        DataError, SystemExit: as the stream raised them.
    """
    # A stream may divide itself among loader processes, and leave out what others read: there is one at most.
    settings = loader_settings(loading, min(loading.num_workers, 1), device)
    steps = _Steps(loading, own, global_batch_size, position, seed, epoch)
    for step in loaded(DataLoader(steps, batch_size=None, **settings)):
        yield dataclasses.replace(step, contents=to_device(step.contents, device, dtype))


@dataclass
class _Steps(IterableDataset[Any]):
    """Every step of a worker, or the error that ends them, in the loader process."""

    loading: Loading
    own: Sequence[int]
    global_batch_size: int
    position: StreamPosition
    seed: int
    epoch: int

    def __iter__(self) -> Iterator[Any]:
        stream, collate_fn = self.loading.dataset, self.loading.collate_fn
        try:
            substreams = Substreams(stream, self.own, self.global_batch_size, self.seed, self.epoch, self.position)
            for step in itertools.count(self.position.step):
                samples = substreams.read(step)
                sizes = {number: len(some) for number, some in samples.items()}
                if collate_fn is None:
                    contents = [collated(list(itertools.chain(*samples.values())))]
                else:
                    contents = [self._content(step, number, some) for number, some in samples.items() if some]
                yield StreamStep(sizes, contents, substreams.states(), substreams.fingerprint())
        except CARRIED_ERRORS as error:
            yield error

    def _content(self, step: int, number: int, samples: list[Any]) -> Any:
        assert self.loading.collate_fn is not None
        seed_global_generators(shard_key(self.seed, random_streams.COLLATE, self.epoch, step, number))
        return self.loading.collate_fn(samples)


def stand_in(loading: Loading) -> Any:
    """What the first sample of a stream is collated to, for a worker that has none; None if there is none at all."""
    apart = dataclasses.replace(loading, dataset=copy.deepcopy(loading.dataset))  # it is being read
    with global_generators_kept():
        step = next(iter(_Steps(apart, [0], 1, StreamPosition(0, (0,)), 0, 0)))
    if isinstance(step, CARRIED_ERRORS):
        raise step
    return next(iter(step.contents), None)
