"""Images in files, for sets larger than memory: decoded sample by sample."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.data.augment import augment
from paceline.errors import DataError
from paceline.spec import DataSpec

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's images per channel, with values scaled to 0 … 1."""


@dataclass(frozen=True, eq=False)
class FolderImages:
    """A map-style data set of image files: sample i is (float32 (3, size, size) normalised, class number)."""

    files: Sequence[Path]
    labels: Sequence[int]
    classes: tuple[str, ...]
    image_size: int
    augment: DataSpec | None = None
    """As of `ArraySet`; a crop is a random region of 8 to 100 % of the area, scaled. Draws come from `random`."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Raises: DataError: the file is not a readable image."""
        from PIL import Image

        try:
            with Image.open(self.files[index]) as picture:
                image = picture.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
            raise DataError(f"{self.files[index]} is not a readable image ({problem}); repair or remove it.") from None
        crops = self.augment is not None and "crop" in self.augment.augment
        box, size = _box(*image.size, is_random=crops), (self.image_size, self.image_size)
        pixels = torch.from_numpy(np.array(image.resize(size, Image.Resampling.BILINEAR, box=box)))
        images = pixels.permute(2, 0, 1)[None].contiguous()
        if self.augment is not None:
            others = dataclasses.replace(
                self.augment, augment=tuple(one for one in self.augment.augment if one != "crop")
            )
            images = augment(images, others, random.getrandbits(63), 0, np.zeros(1, np.int64))
        mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
        return (images[0] / 255 - mean) / std, self.labels[index]


def _box(width: int, height: int, *, is_random: bool) -> tuple[float, float, float, float]:
    """The largest square in the middle, as (left, top, right, bottom); or a random region of 8 … 100 % of the area,
    sides in a ratio of 3:4 … 4:3 (Szegedy et al. 2015, section 6)."""
    for _ in range(10 * is_random):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
