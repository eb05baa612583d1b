"""Batches of a stream, read in loader processes where there are any."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.containers import map_tensors, to_device
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
    """The stream's own states after this step, by substream, where it has exact ones."""
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
    num_processes = min(loading.num_workers, len(own))
    settings = loader_settings(loading, num_processes, device)
    is_pinned = settings["pin_memory"] and torch.cuda.is_available()  # a DataLoader too does not without
    settings["pin_memory"] = is_pinned and loading.collate_fn is not None  # what is collated here is pinned here
    steps = _Steps(loading, own, global_batch_size, position, seed, epoch)
    loader = DataLoader(steps, batch_size=None, **settings)
    items = loaded(loader)
    while True:
        of_processes = list(itertools.islice(items, max(1, num_processes)))  # one after the other, in turn
        read: dict[int, tuple[int, Any]] = {}
        states: dict[str, Any] = {}
        for parts, process_states, _ in of_processes:
            read |= parts
            states |= process_states
        sizes = {number: read[number][0] for number in own}
        contents = [content for number in own for size, content in [read[number]] if size]
        if loading.collate_fn is None:
            contents = [collated([sample for samples in contents for sample in samples])]
            contents = map_tensors(contents, Tensor.pin_memory) if is_pinned else contents
        yield StreamStep(sizes, to_device(contents, device, dtype), states, of_processes[0][2])


@dataclass
class _Steps(IterableDataset[Any]):
    """The part of every step that one loader process reads."""

    loading: Loading
    own: Sequence[int]
    global_batch_size: int
    position: StreamPosition
    seed: int
    epoch: int

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        own = self.own
        if worker is not None:
            own = own[worker.id :: worker.num_workers]
            # A stream that splits itself among loader processes would leave samples out, since substreams are split.
            torch.utils.data._utils.worker._worker_info = None
        try:
            substreams = Substreams(
                self.loading.dataset, own, self.global_batch_size, self.seed, self.epoch, self.position
            )
            for step in itertools.count(self.position.step):
                samples = substreams.read(step)
                parts = {number: (len(some), self._content(step, number, some)) for number, some in samples.items()}
                yield parts, substreams.states(), substreams.fingerprint()
        except CARRIED_ERRORS as error:
            yield error

    def _content(self, step: int, number: int, samples: list[Any]) -> Any:
        collate_fn = self.loading.collate_fn
        if collate_fn is None or not samples:
            return samples
        seed_global_generators(shard_key(self.seed, random_streams.COLLATE, self.epoch, step, number))
        return collate_fn(samples)


def stand_in(loading: Loading) -> Any:
    """What the first sample of a stream is collated to, for a worker that has none; None if there is none at all."""
    apart = dataclasses.replace(loading, dataset=copy.deepcopy(loading.dataset))  # it is being read
    with global_generators_kept():
        sample = next(iter(_Steps(apart, [0], 1, StreamPosition(0, (0,)), 0, 0)))
    if isinstance(sample, CARRIED_ERRORS):
        raise sample
    ((size, content),) = sample[0].values()
    return None if not size else content if loading.collate_fn is not None else collated(content)
