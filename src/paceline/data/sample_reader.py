"""Samples of a map-style data set as batches on the device, read and collated by torch's DataLoader."""

from __future__ import annotations

import copy
import ctypes
import functools
import signal
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from paceline.containers import open_container, to_device
from paceline.data import counter_random, random_streams
from paceline.data.generators import generators_in, global_generators_kept, seed_generators, seed_global_generators
from paceline.data.loading import Collate, Loading, collated
from paceline.errors import DataError


class MapDataset(Protocol):
    """What torch calls a map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def set_size(dataset: Any, what: str, alternative: str = "") -> int:
    """The number of samples in a map-style data set. Raises `DataError` if it has none, or is none.

    Args:
        what: names it in messages.
        alternative: what may be given in its place.
    """
    kind = type(dataset)
    what = f"{what}, of type {kind.__name__},"
    if not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        raise DataError(f"{what} lacks a length or samples by number; give a map-style data set{alternative}.")
    if not len(dataset):
        raise DataError(f"{what} has no samples.")
    return len(dataset)


@dataclass(frozen=True)
class SampleRequest:
    """Samples that are read together, by their numbers."""

    shards: tuple[NDArray[np.int64], ...]
    """The numbers of the samples of each virtual shard."""
    batch: int = 0
    """The number of their global batch in its epoch, or of the chunk of an evaluation."""
    first_shard: int = 0
    """The number of the first of these shards in the global batch."""


def read_samples(
    loading: Loading,
    requests: Iterable[SampleRequest],
    *,
    seed: int,
    epoch: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    train: bool = True,
) -> Iterator[list[Any]]:
    """The collated contents of each request's shards, in their order; torch's default gives None for no sample.

    The generators of `random`, `numpy.random` and `torch` are seeded for each sample alone, so random
    transforms give the same sample in whatever process and order it is made, and for each call of the collate function;
    the caller's own generator states are left as they were. Tensors anywhere inside a batch move to `device`; floating
    ones are cast only if `dtype` is float64, since autocast sees to lower precisions.

    Raises:
        DataError, SystemExit: as the data set raised them for a sample, in loader processes too.
        DataError: a sample of a training set, which is read twice at the beginning, differs.
    """
    loader = DataLoader(
        cast(Any, _ShardReader(loading.dataset, loading.collate_fn, seed, epoch, train)),
        batch_sampler=cast(Any, requests),
        **loader_settings(loading, loading.num_workers, device),
    )
    return (to_device(contents, device, dtype) for contents in loaded(loader))


def loader_settings(loading: Loading, num_processes: int, device: torch.device) -> dict[str, Any]:
    """What every DataLoader of ours is given; what it reads comes out as it is."""
    settings = {
        "num_workers": num_processes,
        "collate_fn": _as_it_is,
        "pin_memory": device.type == "cuda" if loading.pin_memory is None else loading.pin_memory,
        "generator": torch.Generator(),  # or the loader would draw from the caller's
    }
    if num_processes:
        for name in ("prefetch_factor", "timeout", "multiprocessing_context"):
            settings[name] = getattr(loading, name)
        settings["worker_init_fn"] = functools.partial(_begin, loading.worker_init_fn)
    return settings


def _begin(init: Callable[[int], Any] | None, number: int) -> None:
    """In a new loader process: it ends with its worker, however that is killed and whatever blocks this process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of <linux/prctl.h>
    if init is not None:
        init(number)


def loaded(loader: DataLoader[Any]) -> Iterator[Any]:
    """What a loader gives, with the caller's generators as they were, and its processes ended in any case. Raises the
    `DataError` or `SystemExit` that its processes gave as a value."""
    items = iter(loader)
    try:
        while True:
            with global_generators_kept():
                item = next(items, _END)
            if item is _END:
                return
            if isinstance(item, CARRIED_ERRORS):
                raise item
            yield item
    except Exception as problem:
        # The frames of a traceback would keep the iterator, and so its processes, which end with it. What a process
        # raised has its own traceback in its message.
        if loader.num_workers:
            raise problem.with_traceback(None) from None
        raise
    finally:
        del items


_END = object()

CARRIED_ERRORS = (DataError, SystemExit)
"""What a loader process hands over as a value: torch would wrap the one into a page of traceback, and of the other it
would say no more than that the process has gone."""


_UNSEEDED = (
    "which differs between numbers of workers, or draws from a generator that is made without a seed, such as "
    "np.random.default_rng(); draw from the global generators, which Paceline seeds for every sample and shard."
)


class _ShardReader:
    """Reads and collates requests, each sample and each shard with global generators that are its own."""

    def __init__(self, dataset: MapDataset, collate_fn: Collate, seed: int, epoch: int, train: bool) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._seed = seed
        self._epoch = epoch
        self._stream = random_streams.COLLATE if train else random_streams.COLLATE_EVALUATION
        self._own = generators_in(dataset, collate_fn)
        self._is_to_be_checked = train and epoch == 0
        """Whether a sample is still to be read twice; the worker that has the first virtual shard does so."""

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, request: SampleRequest) -> Any:  # torch calls this with whatever the batch sampler gives
        try:
            if self._collate_fn is collated and _is_of_plain_tensors(self._dataset) and any(map(len, request.shards)):
                of_shards = map(torch.from_numpy, request.shards)
                return [[tensor.index_select(0, rows) for tensor in self._dataset.tensors] for rows in of_shards]
            return self._read(request)
        except CARRIED_ERRORS as error:
            return error
        except StopIteration as error:  # a loader would take it for its own end, and the epoch would end with it
            raise RuntimeError("a data set's __getitem__, or a collate function, raised StopIteration") from error

    def _read(self, request: SampleRequest) -> list[Any]:
        shards = [[self._sample(index) for index in shard.tolist()] for shard in request.shards]
        if self._is_to_be_checked and (request.batch, request.first_shard) == (0, 0) and shards[0]:
            self._is_to_be_checked = False
            self._check_repetition(int(request.shards[0][0]), shards[0])
        return [
            self._collated_shard(self._collate_fn, samples, request.batch, shard)
            for shard, samples in enumerate(shards, request.first_shard)
        ]

    def _check_repetition(self, index: int, shard: list[Any]) -> None:
        """Read the first sample of a shard again, and collate copies of it twice. Raises `DataError` if they differ."""
        if checksum(shard[:1]) != checksum([self._sample(index)]):
            raise DataError(
                f"Sample {index} of the training set, read twice with the same seeds, differs: it depends on how often "
                f"it was read, {_UNSEEDED}"
            )
        if self._collate_fn is collated:
            return
        try:
            copies = [copy.deepcopy(shard) for _ in range(2)]
        except Exception:  # of objects that cannot be copied; the function may change them
            return
        first, second = (checksum([self._collated_shard(self._collate_fn, one, 0, 0)]) for one in copies)
        if first != second:
            raise DataError(
                "The collate function, called twice with the same samples and seeds, returned different batches: it "
                f"depends on how often it was called, {_UNSEEDED}"
            )

    def _sample(self, index: int) -> Any:
        self._seed_generators(counter_random.key(self._seed, random_streams.SAMPLE, self._epoch, index))
        return self._dataset[index]

    def _collated_shard(self, collate_fn: Collate, samples: list[Any], batch: int, shard: int) -> Any:
        self._seed_generators(shard_key(self._seed, self._stream, self._epoch, batch, shard))
        return collate_fn(samples)

    def _seed_generators(self, seed: int) -> None:
        seed_global_generators(seed)
        seed_generators(self._own, seed)


def shard_key(seed: int, stream: int, epoch: int, batch: int, shard: int) -> int:
    """The seed that belongs to one virtual shard of one global batch."""
    return counter_random.key(seed, stream, epoch, (batch << 24) + shard)


def _is_of_plain_tensors(dataset: MapDataset) -> TypeGuard[TensorDataset]:
    """Whether a batch of it is known to be rows of tensors: no code of a user's makes a sample, and none draws."""
    if type(dataset) is not TensorDataset:
        return False
    return all(
        type(one) is Tensor and one.layout == torch.strided and one.device.type == "cpu" for one in dataset.tensors
    )


def _as_it_is(contents: Any) -> Any:
    return contents


def checksum(values: Iterable[Any], before: int = 0) -> int:
    """A checksum of what samples hold, continued from that of those before them; of types that are not known here only
    the names count."""
    crc = before
    for value in values:
        container = open_container(value)
        if container is not None:
            crc = checksum(container.values, zlib.crc32(repr(container.keys).encode(), crc))
        elif isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
            crc = zlib.crc32(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(), crc)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            crc = zlib.crc32(np.ascontiguousarray(value).tobytes(), crc)
        elif isinstance(value, bytes):
            crc = zlib.crc32(value, crc)
        elif isinstance(value, str | int | float | np.generic | None):
            crc = zlib.crc32(repr(value).encode(), crc)
        else:
            crc = zlib.crc32(type(value).__name__.encode(), crc)
    return crc
