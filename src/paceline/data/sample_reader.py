"""Samples of a map-style data set as batches on the device, read and collated by torch's DataLoader."""

from __future__ import annotations

import ctypes
import functools
import signal
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from paceline.data.loading import Collate, Loading, MapDataset, collated
from paceline.data.randomness import Purpose, generators_in, global_generators_kept, key, seed_all
from paceline.errors import DataError
from paceline.tensors import open_container, to_device

CARRIED_ERRORS = (DataError, SystemExit)
"""What a loader process hands over as a value: torch would wrap the one into a page of traceback, and of the other it
would say no more than that the process has gone."""

_UNSEEDED = (
    "draw from the global generators, which Paceline seeds for every sample and shard, not np.random.default_rng()."
)
_END = object()


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
        DataError: the first shard of a training set, which is read twice at the beginning, differs.
    """
    reader = _ShardReader(loading, seed, epoch, train)
    settings = loader_settings(loading, loading.num_workers, device)
    loader = DataLoader(cast(Any, reader), batch_sampler=cast(Any, requests), **settings)
    return (to_device(contents, device, dtype) for contents in loader_items(loader))


def loader_settings(loading: Loading, num_processes: int, device: torch.device) -> dict[str, Any]:
    """The arguments that all DataLoaders have here; they return what they read as it is."""
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


def _as_it_is(contents: Any) -> Any:
    return contents


def _begin(init: Callable[[int], Any] | None, number: int) -> None:
    """In a new loader process: it ends with its worker, however that is killed and whatever blocks this process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of <linux/prctl.h>
    if init is not None:
        init(number)


def loader_items(loader: DataLoader[Any]) -> Iterator[Any]:
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


class _ShardReader:
    """Reads and collates requests, each sample and each shard with global generators that are its own."""

    def __init__(self, loading: Loading, seed: int, epoch: int, train: bool) -> None:
        self._dataset: Any = loading.dataset
        self._collate_fn: Collate = loading.collate_fn
        self._seed = seed
        self._epoch = epoch
        self._purpose = Purpose.COLLATE if train else Purpose.COLLATE_EVALUATION
        self._own = generators_in(loading.dataset, loading.collate_fn)
        self._is_to_be_checked = train and epoch == 0
        """Whether a shard is still to be read twice: the first one, by the worker that has it."""

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, request: SampleRequest) -> Any:  # torch calls this with whatever the batch sampler gives
        try:
            if self._collate_fn is collated and _is_of_plain_tensors(self._dataset) and any(map(len, request.shards)):
                of_shards = map(torch.from_numpy, request.shards)
                return [[tensor.index_select(0, rows) for tensor in self._dataset.tensors] for rows in of_shards]
            first = request.first_shard
            return [self._content(rows, request.batch, shard) for shard, rows in enumerate(request.shards, first)]
        except CARRIED_ERRORS as error:
            return error
        except StopIteration as error:  # a loader would take it for its own end, and the epoch would end with it
            raise RuntimeError("a data set's __getitem__, or a collate function, raised StopIteration") from error

    def _content(self, rows: NDArray[np.int64], batch: int, shard: int) -> Any:
        """The content of one virtual shard. Raises `DataError` if it is read a second time, and differs."""
        samples, collate_key = self._samples(rows), shard_key(self._seed, self._purpose, self._epoch, batch, shard)
        is_checked = self._is_to_be_checked and (batch, shard) == (0, 0) and len(rows) > 0
        before = checksum(samples) if is_checked else 0  # the collate function may change them
        seed_all(collate_key, self._own)
        content = self._collate_fn(samples)
        if is_checked:
            self._is_to_be_checked = False
            again = self._samples(rows)
            if checksum(again) != before:
                raise DataError(f"Samples of the training set, read twice with the same seeds, differ; {_UNSEEDED}")
            seed_all(collate_key, self._own)
            if checksum([self._collate_fn(again)]) != checksum([content]):
                raise DataError(
                    f"The collate function, called twice with the same seeds, returned different batches; {_UNSEEDED}"
                )
        return content

    def _samples(self, rows: NDArray[np.int64]) -> list[Any]:
        samples = []
        for index in rows.tolist():
            seed_all(key(self._seed, Purpose.SAMPLE, self._epoch, index), self._own)
            samples.append(self._dataset[index])
        return samples


def shard_key(seed: int, purpose: int, epoch: int, batch: int, shard: int) -> int:
    """The seed that belongs to one virtual shard of one global batch."""
    return key(seed, purpose, epoch, (batch << 24) + shard)


def _is_of_plain_tensors(dataset: MapDataset) -> TypeGuard[TensorDataset]:
    """Whether a batch of it is known to be rows of tensors: no code of a user's makes a sample, and none draws."""
    if type(dataset) is not TensorDataset:
        return False
    return all(
        type(one) is Tensor and one.layout == torch.strided and one.device.type == "cpu" for one in dataset.tensors
    )


def checksum(values: Iterable[Any], before: int = 0) -> int:
    """A checksum of the contents of samples, continued from `before`, the checksum of earlier ones. Of a value whose
    type is not known here only the type's name counts."""
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
