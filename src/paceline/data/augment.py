"""Random crop, flip and cutout of a whole batch at once, on the device where the batch is.

Every draw is a hash of (seed, what it is for, epoch, sample index), so a sample gets the same augmentation in any batch
and on any worker.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.randomness import Purpose, integers, on_device, uniform
from paceline.spec import DataSpec


def augment(images: Tensor, spec: DataSpec, seed: int, epoch: int, indices: NDArray[np.int64]) -> Tensor:
    """Copies of `images`, (b, C, H, W) in uint8, float32 or float64, contiguous, changed as `spec.augment` says; the
    same shape and type.

    A crop pads by `crop_padding` zero pixels on every side and cuts the original size out at a random place; a flip
    mirrors left to right with probability one half; cutout blackens a square of `cutout_size` pixels a side, centred
    anywhere in the image and clipped at its borders. `indices` (b,) are the samples' numbers in their data set, on the
    host. Images come before normalisation: the 0 that padding and cutout write is black, not the mean of the data.
    """
    if "crop" in spec.augment:
        high = 2 * spec.crop_padding + 1
        top = integers(seed, Purpose.CROP_Y, epoch, indices, high)
        left = integers(seed, Purpose.CROP_X, epoch, indices, high)
        images = _crop(images, spec.crop_padding, top, left)
    if "flip" in spec.augment:
        images = _flip(images, uniform(seed, Purpose.FLIP, epoch, indices) < 0.5)
    if "cutout" in spec.augment:
        height, width = images.shape[-2:]
        y = integers(seed, Purpose.CUTOUT_Y, epoch, indices, height)
        x = integers(seed, Purpose.CUTOUT_X, epoch, indices, width)
        images = _cutout(images, spec.cutout_size, y, x)
    return images


def _crop(images: Tensor, padding: int, top: NDArray[np.int64], left: NDArray[np.int64]) -> Tensor:
    b, c, h, w = images.shape
    padded = images.new_zeros(b, c, h + 2 * padding, w + 2 * padding)
    padded[:, :, padding : padding + h, padding : padding + w] = images
    image, channel, row, column = padded.stride()
    # windows[i, y, x] is image i cut out at (y, x): a view in which every possible crop already stands.
    windows = padded.as_strided(
        (b, 2 * padding + 1, 2 * padding + 1, c, h, w), (image, row, column, channel, row, column)
    )
    if images.device.type == "cpu":  # NumPy gathers whole rows of pixels where torch goes pixel by pixel
        return torch.from_numpy(windows.numpy()[np.arange(b), top, left])
    to = images.device
    return windows[torch.arange(b, device=to), on_device(top, to), on_device(left, to)]


def _flip(images: Tensor, flipped: NDArray[np.bool_]) -> Tensor:
    mirrored = images.flip(-1)
    if images.device.type == "cpu":  # a copy of the others' rows; torch.where would weigh every pixel
        others = np.flatnonzero(~flipped)
        mirrored.numpy()[others] = images.numpy()[others]
        return mirrored
    return torch.where(on_device(flipped, images.device)[:, None, None, None], mirrored, images)


def _cutout(images: Tensor, size: int, y: NDArray[np.int64], x: NDArray[np.int64]) -> Tensor:
    height, width = images.shape[-2:]
    keep = ~(_within(y, size, height)[:, :, None] & _within(x, size, width)[:, None, :])
    # Multiplying by 0 and 1 of the images' own type is vectorised; masked_fill on bytes is 50 times slower.
    return images * on_device(keep, images.device).to(images.dtype)[:, None]


def _within(centre: NDArray[np.int64], size: int, length: int) -> NDArray[np.bool_]:
    """(b, length): which positions lie in the `size` positions around each centre."""
    offset = np.arange(length) - (centre[:, None] - size // 2)
    return (offset >= 0) & (offset < size)
