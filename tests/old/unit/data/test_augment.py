"""The vectorised augmentation against the plainest one possible, a sample and a pixel at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.data import random_streams
from paceline.data.augment import Augmentation, augment
from paceline.data.counter_random import integers, uniform
from paceline.spec import DataSpec


def reference(image: Tensor, augmentation: Augmentation, seed: int, epoch: int, index: int) -> Tensor:
    """One image (C, H, W), by definition."""
    one = np.array([index])
    height, width = image.shape[-2:]
    if augmentation.crop_padding is not None:
        pad = augmentation.crop_padding
        top = int(integers(seed, random_streams.CROP_Y, epoch, one, 2 * pad + 1)[0]) - pad
        left = int(integers(seed, random_streams.CROP_X, epoch, one, 2 * pad + 1)[0]) - pad
        moved = torch.zeros_like(image)
        for y in range(height):
            for x in range(width):
                if 0 <= y + top < height and 0 <= x + left < width:
                    moved[:, y, x] = image[:, y + top, x + left]
        image = moved
    if augmentation.flip and uniform(seed, random_streams.FLIP, epoch, one)[0] < 0.5:
        image = torch.stack([image[..., x] for x in reversed(range(width))], dim=-1)
    if augmentation.cutout_size is not None:
        top = int(integers(seed, random_streams.CUTOUT_Y, epoch, one, height)[0]) - augmentation.cutout_size // 2
        left = int(integers(seed, random_streams.CUTOUT_X, epoch, one, width)[0]) - augmentation.cutout_size // 2
        image = image.clone()
        for y in range(max(0, top), min(height, top + augmentation.cutout_size)):
            for x in range(max(0, left), min(width, left + augmentation.cutout_size)):
                image[:, y, x] = 0
    return image


def images(count: int, channels: int = 3, height: int = 9, width: int = 7) -> Tensor:
    shape = (count, channels, height, width)
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(count)).to(torch.uint8)


@settings(max_examples=40, deadline=None)
@given(
    augmentation=st.builds(
        Augmentation,
        crop_padding=st.none() | st.integers(1, 9),
        flip=st.booleans(),
        cutout_size=st.none() | st.integers(1, 12),
    ),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64]),
    count=st.integers(0, 5),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
)
def test_equals_the_reference(
    augmentation: Augmentation, dtype: torch.dtype, count: int, seed: int, epoch: int
) -> None:
    batch = images(count).to(dtype)
    before = batch.clone()
    indices = np.arange(count, dtype=np.int64) * 7 + 3
    found = augment(batch, augmentation, seed, epoch, indices)
    assert found.dtype == dtype and found.shape == batch.shape
    for row, index in enumerate(indices):
        assert torch.equal(found[row], reference(batch[row], augmentation, seed, epoch, int(index)))
    assert torch.equal(batch, before), "the caller's images were written to"


def test_a_sample_looks_the_same_in_any_batch() -> None:
    augmentation = Augmentation(crop_padding=2, flip=True, cutout_size=3)
    batch, indices = images(64), np.arange(64, dtype=np.int64)
    together = augment(batch, augmentation, 5, 1, indices)
    order = np.random.default_rng(0).permutation(64)
    for part in np.array_split(order, 7):
        alone = augment(batch[part], augmentation, 5, 1, indices[part])
        assert torch.equal(alone, together[part])


def test_epochs_and_seeds_differ() -> None:
    augmentation = Augmentation(crop_padding=2, flip=True, cutout_size=3)
    batch, indices = images(16), np.arange(16, dtype=np.int64)
    first = augment(batch, augmentation, 0, 0, indices)
    assert not torch.equal(first, augment(batch, augmentation, 0, 1, indices))
    assert not torch.equal(first, augment(batch, augmentation, 1, 0, indices))


def test_draws_are_spread_evenly() -> None:
    """Half the images are flipped, and each of the 25 offsets of a crop with padding 2 comes up alike."""
    count = 5000
    indices = np.arange(count, dtype=np.int64)
    batch = torch.zeros(count, 1, 5, 5, dtype=torch.uint8)
    batch[:, 0, 2, 2] = 1
    cropped = augment(batch, Augmentation(crop_padding=2), 0, 0, indices)
    share = cropped.float().mean(dim=(0, 1)).flatten()
    assert share.sum().item() == pytest.approx(1)
    assert share.min() > 0.03 and share.max() < 0.05  # 1/25, give or take 3.6 standard deviations
    batch = torch.tensor([1, 2], dtype=torch.uint8).expand(count, 1, 1, 2).contiguous()
    flipped = augment(batch, Augmentation(flip=True), 0, 0, indices)
    assert (flipped[:, 0, 0, 0] == 2).float().mean().item() == pytest.approx(0.5, abs=0.03)


def test_from_spec_takes_only_what_is_named() -> None:
    assert Augmentation.from_spec(DataSpec()) is None
    spec = DataSpec(augment=("cutout",), crop_padding=3, cutout_size=5)
    assert Augmentation.from_spec(spec) == Augmentation(crop_padding=None, flip=False, cutout_size=5)
    spec = DataSpec(augment=("flip", "crop"), crop_padding=3)
    assert Augmentation.from_spec(spec) == Augmentation(crop_padding=3, flip=True, cutout_size=None)
