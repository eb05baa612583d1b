"""A folder of images, one subfolder a class; for sets larger than memory, decoded sample by sample."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.data.augment import Augmentation, augment
from paceline.data.sources import folder_of, import_extra, read_options
from paceline.errors import DataError
from paceline.spec import DataSpec
from paceline.spec.codec import PositiveInt

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's images per channel, with values scaled to 0 … 1."""


@dataclass(frozen=True)
class FolderOptions:
    image_size: PositiveInt = 224
    """Pixels a side of the square that every image becomes."""


@dataclass(frozen=True, eq=False)
class FolderImages:
    """A map-style data set of image files: sample i is (float32 (3, size, size) normalised, class number)."""

    files: Sequence[Path]
    labels: Sequence[int]
    classes: tuple[str, ...]
    image_size: int
    augment: Augmentation | None = None
    """Crop here means a random region of 8 to 100 % of the area, scaled to size. Draws come from `random`."""

    def __len__(self) -> int:
        return len(self.files)

    def take(self, limit: int) -> FolderImages:
        """The first `limit` samples, or all when there are fewer."""
        return dataclasses.replace(self, files=self.files[:limit], labels=self.labels[:limit])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Raises: DataError: the file is not a readable image."""
        from PIL import Image

        try:
            with Image.open(self.files[index]) as picture:
                image = picture.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
            raise DataError(f"{self.files[index]} is not a readable image ({problem}); repair or remove it.") from None
        crops = self.augment is not None and self.augment.crop_padding is not None
        box, size = _box(*image.size, is_random=crops), (self.image_size, self.image_size)
        pixels = torch.from_numpy(np.array(image.resize(size, Image.Resampling.BILINEAR, box=box)))
        images = pixels.permute(2, 0, 1)[None].contiguous()
        if self.augment is not None:
            others = dataclasses.replace(self.augment, crop_padding=None)
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


def load_folder(spec: DataSpec) -> tuple[FolderImages, FolderImages]:
    """`data.dir` with train/ and val/ (or test/) of class folders; or class folders alone, of which a tenth
    is test.

    Raises:
        DataError: the directory lacks that shape, or the two parts have different classes.
    """
    size = read_options(FolderOptions, spec).image_size
    import_extra("PIL.Image", "images", "Reading a folder of images")
    root = folder_of(spec)
    if (root / "train").is_dir():
        held_out = root / ("val" if (root / "val").is_dir() else "test")
        if not held_out.is_dir():
            raise DataError(f"{root} has train/ but neither val/ nor test/; add one, or give class folders alone.")
        train, test = _files(root / "train"), _files(held_out)
        if odd := sorted(set(train) ^ set(test)):
            raise DataError(f"The class {odd[0]!r} is in only one of train/ and {held_out.name}/ of {root}.")
    else:
        train, test = _files(root), {}
        for name, files in train.items():
            test[name] = [file for file in files if _is_test(file)]
            train[name] = [file for file in files if not _is_test(file)]
        if not any(train.values()) or not any(test.values()):
            raise DataError(f"{root} has too few images to set a tenth apart; split them into train/ and val/.")
    return _images(train, size), _images(test, size)


def _files(folder: Path) -> dict[str, list[Path]]:
    """Class name -> its image files at any depth, both in sorted order. Raises `DataError` where there are none."""
    found = {}
    for one in sorted(path for path in folder.glob("[!.]*") if path.is_dir()):
        found[one.name] = sorted(path for path in one.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        if not found[one.name]:
            raise DataError(f"{one} has no images ({', '.join(sorted(IMAGE_SUFFIXES))}); add some.")
    if not found:
        raise DataError(f"{folder} has no subfolders; expected one for each class, with its images.")
    return found


def _is_test(file: Path) -> bool:
    """One file in ten, by a hash of its name: a file stays in the same split when other files are added or removed."""
    digest = hashlib.sha256(f"{file.parent.name}/{file.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def _images(files: dict[str, list[Path]], image_size: int) -> FolderImages:
    labels = [label for label, name in enumerate(files) for _ in files[name]]
    return FolderImages([*itertools.chain(*files.values())], labels, tuple(files), image_size)
