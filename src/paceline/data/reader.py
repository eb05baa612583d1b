"""From sample numbers to batches on the device: `ArrayReader` for array sets, `stream_batches` for others."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from paceline.containers import to_device
from paceline.data import counter_random, random_streams
from paceline.data.array_set import ArraySet
from paceline.data.augment import augment
from paceline.errors import DataError


class MapDataset(Protocol):
    """What torch calls a map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ArrayReader:
    """Gathers, augments and normalises batches of an array set as whole tensors.

    On a CUDA device the whole set stays in device memory if it fits into a quarter of what is free; otherwise
    each batch travels there from pinned memory, asynchronously, and the augmentation runs there either way.
    """

    def __init__(
        self, array_set: ArraySet, device: torch.device, dtype: torch.dtype, channels_last: bool, seed: int
    ) -> None:
        self._augmentation = array_set.augment
        self._device = device
        self._dtype = dtype
        self._channels_last = channels_last
        self._seed = seed
        # A plain array view of a memory map: the same pages, without the subclass's cost on every access.
        self._inputs = np.ascontiguousarray(array_set.inputs)
        self._targets = np.ascontiguousarray(array_set.targets)
        self._resident = _resident(self._inputs, self._targets, device)
        self._affine: tuple[Tensor, Tensor] | None = None
        if array_set.mean is not None:
            scale, shift = array_set.affine()
            self._affine = self._per_channel(scale), self._per_channel(shift)

    def _per_channel(self, values: NDArray[np.float64]) -> Tensor:
        """Per-channel numbers laid out to be applied to a batch in this reader's memory format."""
        channels = torch.from_numpy(values).to(self._device, _arithmetic(self._dtype))
        if not self._channels_last:
            return channels[:, None, None]
        return channels if len(channels) == 1 else channels.repeat(self._inputs.shape[-1])

    def read(self, epoch: int, indices: NDArray[np.int64], train: bool) -> tuple[Tensor, Tensor]:
        """The samples `indices` (b,) as (inputs, targets) on the device; augmented if `train`.

        Images: inputs (b, C, H, W) in the reader's dtype and memory format, targets int64 (b,).
        Tokens: inputs and targets int64 (b, L).
        """
        inputs, targets = self._gather(indices)
        targets = targets.to(torch.int64)
        if self._affine is None:
            return inputs.to(self._dtype if inputs.is_floating_point() else torch.int64), targets
        if train and self._augmentation is not None:
            inputs = augment(inputs, self._augmentation, self._seed, epoch, indices)
        return self._normalise(inputs), targets

    def _gather(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        if self._resident is not None:
            rows = torch.from_numpy(indices).pin_memory().to(self._device, non_blocking=True)
            return self._resident[0].index_select(0, rows), self._resident[1].index_select(0, rows)
        inputs = torch.from_numpy(self._inputs.take(indices, axis=0))
        targets = torch.from_numpy(self._targets.take(indices, axis=0))
        if self._device.type == "cpu":
            return inputs, targets
        return (
            inputs.pin_memory().to(self._device, non_blocking=True),
            targets.pin_memory().to(self._device, non_blocking=True),
        )

    def _normalise(self, images: Tensor) -> Tensor:
        assert self._affine is not None
        scale, shift = self._affine
        if not self._channels_last:
            return images.to(scale.dtype).mul_(scale).add_(shift).to(self._dtype)
        # Pixels change places while they are bytes, then whole rows of (W * C) are scaled at once: half the
        # time of normalising first and reordering floats.
        b, c, h, w = images.shape
        pixels = images if c == 1 else torch.stack(images.unbind(1), dim=-1)
        rows = pixels.view(b * h, w * c).to(scale.dtype).mul_(scale).add_(shift)
        return rows.to(self._dtype).view(b, h, w, c).permute(0, 3, 1, 2)


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    """Normalise in at least single precision; half precision is for the result."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _resident(inputs: NDArray[Any], targets: NDArray[Any], device: torch.device) -> tuple[Tensor, Tensor] | None:
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if inputs.nbytes + targets.nbytes > free_bytes // 4:
        return None
    # torch.tensor copies: a read-only map must not be shared with a tensor, which is always writable.
    return torch.tensor(inputs, device=device), torch.tensor(targets, device=device)


def stream_batches(
    dataset: MapDataset,
    index_lists: Iterable[Sequence[int]],
    *,
    seed: int,
    epoch: int,
    num_workers: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Any]:
    """Collated batches of a map-style data set, one for each list of sample numbers, in their order.

    The generators of `random`, `numpy.random` and `torch` are seeded for each sample alone, so random
    transforms give the same sample in whatever process and order it is made; the caller's own generator
    states are left as they were. Tensors anywhere inside a batch move to `device`; floating ones are cast
    only if `dtype` is float64, since autocast sees to lower precisions. An empty list gives None, there being
    nothing to collate.

    Raises:
        DataError, SystemExit: as the data set raised them for a sample, in `num_workers` processes too.
    """
    loader = DataLoader(
        cast(Any, _SeededSamples(dataset, seed, epoch)),
        batch_sampler=cast(Any, index_lists),
        num_workers=num_workers,
        collate_fn=_collate,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # or the loader would draw from the caller's
    )
    batches = iter(loader)
    try:
        while True:
            with _global_generators_kept():
                batch = next(batches, _END)
            if batch is _END:
                return
            if isinstance(batch, _CARRIED_ERRORS):
                raise batch
            yield to_device(batch, device, dtype)
    finally:
        # An error's traceback keeps the loader alive until the garbage collector takes it apart, and in its
        # order the loader's processes are no longer told to stop: it would wait 5 s for each. So stop them
        # now.
        stop_processes = getattr(batches, "_shutdown_workers", None)
        if stop_processes is not None:
            stop_processes()


_END = object()

_CARRIED_ERRORS = (DataError, SystemExit)
"""What a loader process hands over as a value: torch would wrap the one into a page of traceback, and of the other it
would say no more than that the process has gone."""


class _SeededSamples:
    """The user's data set, each sample made with global generators that are its own."""

    def __init__(self, dataset: MapDataset, seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        sample_seed = counter_random.key(self._seed, random_streams.SAMPLE, self._epoch, index)
        random.seed(sample_seed)
        np.random.seed([sample_seed & 0xFFFFFFFF, sample_seed >> 32])
        torch.default_generator.manual_seed(sample_seed)  # the CPU's alone: no CUDA call in a forked process
        try:
            return self._dataset[index]
        except _CARRIED_ERRORS as error:
            return error


def _collate(samples: list[Any]) -> Any:
    for sample in samples:
        if isinstance(sample, _CARRIED_ERRORS):
            return sample
    return default_collate(samples) if samples else None


@contextlib.contextmanager
def _global_generators_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
