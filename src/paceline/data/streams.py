"""A stream cut into as many substreams as a job has virtual shards, the same on any number of workers.

Global batch k takes the next samples of every substream. What a stream may have besides `__iter__`, which begins anew:

- `num_shards`, and `shard(num_shards, index)`, the stream of every num_shards-th shard from number index on, as the
  streams of `datasets` have them: the stream is split by its shards where their number is a multiple of that of the
  substreams, and each worker reads its own. Any other stream is read as it comes: its next samples form the next global
  batch, and the substreams are their places in it; each worker reads the whole stream then, and keeps its own.
- `set_epoch(epoch)`, called before an epoch.
- `state_dict()`, `load_state_dict(state)`, a JSON value by which it goes on exactly; others are read again.
- `digest()`, a text that tells whether a resumed run reads the same stream.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.loading import Loading
from paceline.data.randomness import Purpose, generators_in, global_generators_kept, key, seed_all
from paceline.data.sample_reader import CARRIED_ERRORS, checksum, loader_items, loader_settings, shard_key
from paceline.errors import DataError
from paceline.tensors import to_device

_WHOLE = "whole"
"""Names the state of a stream that is not split."""
_END = object()


@dataclass(frozen=True)
class StreamPosition:
    """How far an epoch of a stream has been trained on."""

    step: int
    """The number of the next global batch."""
    taken: tuple[int, ...]
    """How many samples of each substream came before it."""
    states: Mapping[str, Any] = field(default_factory=dict)
    """States of the stream itself there, by the number of the substream; those that are known on this worker."""
    fingerprint: int = 0
    """The fingerprint of the samples before it, if the stream is read as it comes; 0: not known."""


def check_stream(stream: Any) -> None:
    """Raises `DataError` for a stream that workers cannot share."""
    if iter(stream) is stream:
        raise DataError(
            f"The training set is a {type(stream).__name__}, which can be read only once; give a data set whose "
            "__iter__ begins anew, such as a torch IterableDataset."
        )
    if getattr(stream, "_distributed", None) is not None:
        raise DataError(
            "The stream was split by split_dataset_by_node, which Paceline does itself; give the whole stream."
        )


def is_split(stream: Any, num_substreams: int) -> bool:
    """Whether each substream consists of shards of the set's own."""
    num_shards = getattr(stream, "num_shards", None)
    return isinstance(num_shards, int) and hasattr(stream, "shard") and num_shards % num_substreams == 0 < num_shards


def quota(step: int, substream: int, num_substreams: int, global_batch_size: int) -> int:
    """How many samples a full global batch takes of a substream; the remainder moves on, so that all are equal."""
    each, rest = divmod(global_batch_size, num_substreams)
    return each + ((substream - step * rest) % num_substreams < rest)


def _set_epoch(stream: Any, epoch: int) -> None:
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(epoch)


class _Source:
    """A stream that is read one by one, each sample with generators that are its own."""

    def __init__(self, stream: Any, seed: int, epoch: int, first_key: int) -> None:
        self._stream = stream
        self._generators = generators_in(stream)
        self._key = seed, Purpose.SAMPLE, epoch
        self._next = first_key
        self._samples: Iterator[Any] | None = None
        self._is_over = False
        self.fingerprint = 0

    def go_to(self, count: int, state: Any, fingerprint: int) -> None:
        """Continue after the first `count` samples: by the stream's own state, or by reading them again. `fingerprint`:
        that of these samples; 0: not known."""
        if count == 0:
            return
        if state is not None and has_exact_state(self._stream):
            self._stream = copy.deepcopy(self._stream)  # the next epoch begins at the beginning
            self._generators = generators_in(self._stream)
            self._stream.load_state_dict(copy.deepcopy(state))
            self._next += count
            self.fingerprint = fingerprint
        elif len(self.take(count)) < count:
            raise DataError(
                f"The stream ended before the {count:,} samples that it had given when this run was saved; resume with "
                "the same data."
            )
        elif fingerprint not in (0, self.fingerprint):
            raise DataError(
                f"The first {count:,} samples of the stream are others than when this run was saved; give them in an "
                "order that depends on the epoch alone (set_epoch), or resume nevertheless with force = True."
            )

    def take(self, count: int) -> list[Any]:
        """The next samples; fewer at the end."""
        found: list[Any] = []
        while len(found) < count and not self._is_over:
            seed_all(key(*self._key, self._next), self._generators)
            if self._samples is None:
                self._samples = iter(self._stream)
            sample = next(self._samples, _END)
            if sample is _END:
                self._is_over, self._samples = True, None
                break
            found.append(sample)
            self._next += 1
        self.fingerprint = checksum(found, self.fingerprint)
        return found

    def state(self) -> Any:
        """The stream's own state; None where it has none, or has not begun or has ended."""
        if self._samples is None or not has_exact_state(self._stream):
            return None
        state = self._stream.state_dict()
        try:  # it is kept as JSON, which may not have it all; a copy, as the stream may change its own while it is read
            kept = json.loads(json.dumps(state))
            return kept if kept == state else None
        except (TypeError, ValueError):
            return None


def has_exact_state(stream: Any) -> bool:
    """Whether a stream resumes exactly by its own state; those of `datasets` do not where they shuffle, as the samples
    in the buffer are lost, and do not say so."""
    is_of_datasets = type(stream).__module__.partition(".")[0] == "datasets"
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict") and not is_of_datasets


@dataclass(frozen=True)
class StreamStep:
    """A worker's part of one global batch of a stream."""

    sizes: dict[int, int]
    """How many samples each of its substreams gave."""
    contents: list[Any]
    """The collated samples of each substream that gave any."""
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
    """The steps of an epoch from `position` on, endless: those after the end are empty. Raises `DataError` or
    `SystemExit` as the stream raised them. `own`: the numbers of this worker's substreams."""
    # A stream may divide itself among loader processes, and leave out what others read: there is one at most.
    settings = loader_settings(loading, min(loading.num_workers, 1), device)
    steps = _Steps(loading, own, global_batch_size, position, seed, epoch)
    for step in loader_items(DataLoader(steps, batch_size=None, **settings)):
        yield dataclasses.replace(step, contents=to_device(step.contents, device, dtype))


@dataclass
class _Steps(IterableDataset[Any]):
    """Every step of a worker, or the error that ends them, in the process that reads them."""

    loading: Loading
    own: Sequence[int]
    global_batch_size: int
    position: StreamPosition
    seed: int
    epoch: int

    def __iter__(self) -> Iterator[Any]:
        try:
            sources = self._sources()
            whole = sources.get(_WHOLE)
            for step in itertools.count(self.position.step):
                samples = self._samples(sources, step)
                sizes = {number: len(some) for number, some in samples.items()}
                contents = [self._content(step, number, some) for number, some in samples.items() if some]
                states = {name: state for name, one in sources.items() if (state := one.state()) is not None}
                yield StreamStep(sizes, contents, states, 0 if whole is None else whole.fingerprint)
        except CARRIED_ERRORS as error:
            yield error

    def _sources(self) -> dict[str, _Source]:
        """What this worker reads, from the position on: its own substreams by their numbers, or the whole stream."""
        stream, taken = self.loading.dataset, self.position.taken
        _set_epoch(stream, self.epoch)
        parts = {_WHOLE: (stream, 0, sum(taken))}
        if is_split(stream, len(taken)):
            shards = {number: stream.shard(num_shards=len(taken), index=number) for number in self.own}
            parts = {str(number): (shard, number << 40, taken[number]) for number, shard in shards.items()}
        found: dict[str, _Source] = {}
        for name, (part, first_key, count) in parts.items():
            _set_epoch(part, self.epoch)
            found[name] = _Source(part, self.seed, self.epoch, first_key)
            found[name].go_to(count, self.position.states.get(name), self.position.fingerprint)
        return found

    def _samples(self, sources: Mapping[str, _Source], step: int) -> dict[int, list[Any]]:
        """The samples of global batch `step` in each own substream, fewer or none after its end."""
        num = len(self.position.taken)
        counts = [quota(step, number, num, self.global_batch_size) for number in range(num)]
        if _WHOLE not in sources:
            return {number: sources[str(number)].take(counts[number]) for number in self.own}
        batch = sources[_WHOLE].take(self.global_batch_size)
        ends = [*itertools.accumulate(counts)]
        return {number: batch[ends[number] - counts[number] : ends[number]] for number in self.own}

    def _content(self, step: int, number: int, samples: list[Any]) -> Any:
        seed_all(shard_key(self.seed, Purpose.COLLATE, self.epoch, step, number))
        return self.loading.collate_fn(samples)


def placeholder_content(loading: Loading) -> Any:
    """The first sample of a stream, collated, for a worker without samples; None if the stream has none."""
    apart = dataclasses.replace(loading, dataset=copy.deepcopy(loading.dataset))  # it is being read
    with global_generators_kept():
        step = next(iter(_Steps(apart, [0], 1, StreamPosition(0, (0,)), 0, 0)))
    if isinstance(step, CARRIED_ERRORS):
        raise step
    return next(iter(step.contents), None)
