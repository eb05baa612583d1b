"""Arrays of images and tokens come as normalised, augmented batches: equal to what is computed for one sample and one
pixel at a time, the same in any batch and on any number of workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.data import ArrayReader, ArraySet, Purpose
from paceline.data.augment import augment
from paceline.data.randomness import integers, uniform
from paceline.spec import DataSpec
from tests.kit.workers import run_ranks
from tests.unit.data.reading import read_batches

CPU = torch.device("cpu")
INDICES = np.array([3, 0, 19, 3])
ALL = DataSpec(augment=("crop", "flip", "cutout"), crop_padding=2, cutout_size=2)


def image_set(channels: int = 3, augmentation: DataSpec | None = None) -> ArraySet:
    draw = np.random.default_rng(0)
    inputs = draw.integers(0, 256, (20, channels, 6, 5), dtype=np.uint8)
    inputs.flags.writeable = False
    mean, std = (0.1, 0.5, 0.3)[:channels], (0.2, 0.4, 0.7)[:channels]
    return ArraySet(inputs, draw.integers(0, 10, 20), 10, mean, std, augmentation)


def normalised(pixels: Tensor, images: ArraySet) -> Tensor:
    """(x / 255 - mean) / std in float64."""
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (images.mean, images.std))
    return (pixels.double() / 255 - mean) / std


def augmented(image: Tensor, augmentation: DataSpec, seed: int, epoch: int, index: int) -> Tensor:
    """One image (C, H, W), pixel by pixel."""
    one = np.array([index])
    height, width = image.shape[-2:]

    def draw(stream: int, high: int) -> int:
        return int(integers(seed, stream, epoch, one, high)[0])

    if "crop" in augmentation.augment:
        pad = augmentation.crop_padding
        top, left = draw(Purpose.CROP_Y, 2 * pad + 1) - pad, draw(Purpose.CROP_X, 2 * pad + 1) - pad
        moved = torch.zeros_like(image)
        for y in range(max(0, -top), min(height, height - top)):
            for x in range(max(0, -left), min(width, width - left)):
                moved[:, y, x] = image[:, y + top, x + left]
        image = moved
    if "flip" in augmentation.augment and uniform(seed, Purpose.FLIP, epoch, one)[0] < 0.5:
        image = torch.stack([image[..., x] for x in reversed(range(width))], dim=-1)
    if "cutout" in augmentation.augment:
        size = augmentation.cutout_size
        top, left = draw(Purpose.CUTOUT_Y, height) - size // 2, draw(Purpose.CUTOUT_X, width) - size // 2
        image = image.clone()
        for y in range(max(0, top), min(height, top + size)):
            image[:, y, max(0, left) : max(0, left + size)] = 0
    return image


@settings(max_examples=40)
@given(
    augmentation=st.builds(
        DataSpec,
        augment=st.sets(st.sampled_from(["crop", "flip", "cutout"])).map(tuple),
        crop_padding=st.integers(1, 9),
        cutout_size=st.integers(1, 12),
    ),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64]),
    count=st.integers(0, 5),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
)
def test_augmentation_equals_the_loop_over_pixels(
    augmentation: DataSpec, dtype: torch.dtype, count: int, seed: int, epoch: int
) -> None:
    images = torch.randint(1, 256, (count, 3, 9, 7), generator=torch.Generator().manual_seed(count)).to(dtype)
    before, indices = images.clone(), np.arange(count, dtype=np.int64) * 7 + 3
    found = augment(images, augmentation, seed, epoch, indices)
    assert found.dtype == dtype and found.shape == images.shape
    for row, index in enumerate(indices):
        assert torch.equal(found[row], augmented(images[row], augmentation, seed, epoch, int(index)))
    assert torch.equal(images, before), "the caller's images were written to"


def test_augmentations_are_spread_evenly() -> None:
    """Half of the images are flipped, and each of the 25 places of a crop with padding 2 comes as often."""
    count = 5000
    indices = np.arange(count, dtype=np.int64)
    dot = torch.zeros(count, 1, 5, 5, dtype=torch.uint8)
    dot[:, 0, 2, 2] = 1
    share = augment(dot, DataSpec(augment=("crop",), crop_padding=2), 0, 0, indices).float().mean(dim=(0, 1)).flatten()
    assert share.sum().item() == pytest.approx(1)
    assert share.min() > 0.03 and share.max() < 0.05  # 1/25, and 3.6 standard deviations
    pair = torch.tensor([1, 2], dtype=torch.uint8).expand(count, 1, 1, 2).contiguous()
    flipped = augment(pair, DataSpec(augment=("flip",)), 0, 0, indices)
    assert (flipped[:, 0, 0, 0] == 2).float().mean().item() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)]
)
def test_images_are_normalised_in_either_memory_format(
    channels: int, channels_last: bool, dtype: torch.dtype, rounding: float
) -> None:
    images = image_set(channels)
    inputs, targets = ArrayReader(images, CPU, dtype, channels_last, seed=0).read(0, INDICES, train=True)
    wanted = normalised(torch.from_numpy(images.inputs[INDICES]), images)
    assert inputs.dtype == dtype
    torch.testing.assert_close(inputs.double(), wanted, rtol=rounding, atol=rounding)
    assert targets.dtype == torch.int64 and targets.tolist() == images.targets[INDICES].tolist()
    assert inputs.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_images_are_augmented_in_training_only_and_alike_in_both_memory_formats() -> None:
    images = image_set(augmentation=ALL)
    plain, last = (ArrayReader(images, CPU, torch.float64, is_last, seed=4) for is_last in (False, True))
    pixels = torch.from_numpy(images.inputs[INDICES])
    wanted = torch.stack(
        [augmented(one, ALL, 4, 9, index) for one, index in zip(pixels, INDICES.tolist(), strict=True)]
    )
    torch.testing.assert_close(plain.read(9, INDICES, train=True)[0], normalised(wanted, images))
    torch.testing.assert_close(plain.read(9, INDICES, train=False)[0], normalised(pixels, images))
    assert torch.equal(plain.read(9, INDICES, train=True)[0], last.read(9, INDICES, train=True)[0])
    empty, none = last.read(0, np.array([], np.int64), train=True)
    assert empty.shape == (0, 3, 6, 5) and none.shape == (0,)


def test_tokens_of_any_width_come_as_int64() -> None:
    tokens = np.arange(61, dtype=np.uint16)
    texts = ArraySet(tokens[:60].reshape(6, 10), tokens[1:].reshape(6, 10), 256)
    inputs, targets = ArrayReader(texts, CPU, torch.float32, False, 0).read(0, np.array([5, 1]), True)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs[0].tolist() == list(range(50, 60)) and targets[1].tolist() == list(range(11, 21))


def test_an_array_set_is_a_map_style_data_set_too() -> None:
    images = image_set()
    inputs, targets = ArrayReader(images, CPU, torch.float32, False, 0).read(0, np.arange(20), False)
    singles: list[Any] = [images[number] for number in range(len(images))]
    torch.testing.assert_close(torch.stack([one for one, _ in singles]), inputs)
    assert [target for _, target in singles] == targets.tolist()


def _read_images() -> list[Tensor]:
    images = image_set(augmentation=ALL)
    return read_batches(
        images, 7, lambda shards: torch.cat([one[0] for one in shards]), virtual_shards=3, epochs=2, collate_fn=None
    )


def test_workers_together_read_what_one_reads() -> None:
    (alone,) = run_ranks(_read_images, 1)
    for whole, parts in zip(alone, zip(*run_ranks(_read_images, 2), strict=True), strict=True):
        assert torch.equal(torch.cat(parts), whole)
