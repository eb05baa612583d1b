"""A data set in whole arrays, so that a batch is one gather and not a loop over samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.augment import augment
from paceline.data.randomness import on_device
from paceline.spec import DataSpec


@dataclass(frozen=True, eq=False)
class ArraySet:
    """Samples `inputs[i]`, `targets[i]`, for images or for tokens.

    Images: `inputs` uint8 (n, C, H, W), usually a read-only memory map; `targets` integers (n,); `mean` and
    `std` per channel in the scale where 255 is 1.
    Tokens: `inputs` integers (n, L), `targets` integers (n, L), `mean` and `std` None. Any integer type will
    do; a batch is int64 whatever the storage.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any]
    num_classes: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    augment: DataSpec | None = None
    """Its `augment` and what belongs to that is what training applies to this set; evaluation never does."""

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """One sample and its target: a normalised float32 image and an int, or int64 tokens twice."""
        raw, target = np.asarray(self.inputs[index]), np.asarray(self.targets[index])
        wanted = int(target) if target.ndim == 0 else torch.from_numpy(target.astype(np.int64))
        if self.mean is None:
            return torch.from_numpy(raw.astype(np.int64)), wanted
        scale, shift = self.affine()
        image = raw.astype(np.float32) * scale[:, None, None] + shift[:, None, None]
        return torch.from_numpy(image.astype(np.float32)), wanted

    def affine(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(scale, shift), each (C,), with (x / 255 - mean) / std = x * scale + shift for a raw pixel x."""
        mean, std = np.array(self.mean, np.float64), np.array(self.std, np.float64)
        return 1 / (255 * std), -mean / std


class ArrayReader:
    """Gathers, augments and normalises batches of an array set as whole tensors.

    On a CUDA device the whole set stays in device memory if it fits into a quarter of what is free; otherwise
    each batch travels there from pinned memory, asynchronously, and the augmentation runs there either way.
    """

    def __init__(
        self, array_set: ArraySet, device: torch.device, dtype: torch.dtype, channels_last: bool, seed: int
    ) -> None:
        self._augment = array_set.augment
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
        # In single precision at least: half precision is for the result.
        channels = torch.from_numpy(values).to(self._device, torch.promote_types(self._dtype, torch.float32))
        if not self._channels_last:
            return channels[:, None, None]
        return channels if len(channels) == 1 else channels.repeat(self._inputs.shape[-1])

    def read(self, epoch: int, indices: NDArray[np.int64], train: bool) -> tuple[Tensor, Tensor]:
        """The samples `indices` (b,) as (inputs, targets) on the device; augmented if `train`.

        Shapes of images: inputs (b, C, H, W) in the reader's dtype and memory format, targets int64 (b,).
        Tokens: inputs and targets int64 (b, L).
        """
        if self._resident is not None:
            rows = on_device(indices, self._device)
            inputs, targets = (one.index_select(0, rows) for one in self._resident)
        else:
            whole = self._inputs, self._targets
            inputs, targets = (on_device(one.take(indices, axis=0), self._device) for one in whole)
        targets = targets.to(torch.int64)
        if self._affine is None:
            return inputs.to(self._dtype if inputs.is_floating_point() else torch.int64), targets
        if train and self._augment is not None:
            inputs = augment(inputs, self._augment, self._seed, epoch, indices)
        return self._normalised(inputs, *self._affine), targets

    def _normalised(self, images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        if not self._channels_last:
            return images.to(scale.dtype).mul_(scale).add_(shift).to(self._dtype)
        # Pixels change places while they are bytes, then whole rows of (W * C) are scaled at once: half the
        # time of normalising first and reordering floats.
        b, c, h, w = images.shape
        pixels = images if c == 1 else torch.stack(images.unbind(1), dim=-1)
        rows = pixels.view(b * h, w * c).to(scale.dtype).mul_(scale).add_(shift)
        return rows.to(self._dtype).view(b, h, w, c).permute(0, 3, 1, 2)


def _resident(inputs: NDArray[Any], targets: NDArray[Any], device: torch.device) -> tuple[Tensor, Tensor] | None:
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if inputs.nbytes + targets.nbytes > free_bytes // 4:
        return None
    # torch.tensor copies: a read-only map must not be shared with a tensor, which is always writable.
    return torch.tensor(inputs, device=device), torch.tensor(targets, device=device)
