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
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.augment import Augmentation
from paceline.data.sources import folder_of, import_extra, read_options
from paceline.errors import DataError
from paceline.spec import DataSpec
from paceline.spec.codec import PositiveInt

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's images per channel, with values scaled to 0 … 1."""
Box = tuple[float, float, float, float]
"""(left, top, right, bottom) of a part of an image."""


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

    @property
    def num_classes(self) -> int:
        return len(self.classes)

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
        crop = self.augment is not None and self.augment.crop_padding is not None
        box = _random_box(*image.size) if crop else _middle_box(*image.size)
        size = (self.image_size, self.image_size)
        pixels = np.array(image.resize(size, Image.Resampling.BILINEAR, box=box), np.float32) / np.float32(255)
        if self.augment is not None:
            pixels = _flip_and_cut(pixels, self.augment)
        normalised = (pixels - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
        return torch.from_numpy(np.ascontiguousarray(normalised.transpose(2, 0, 1))), self.labels[index]


def load_folder(spec: DataSpec) -> tuple[FolderImages, FolderImages]:
    """`data.dir` with train/ and val/ (or test/) of class folders; or class folders alone, of which a tenth
    is test.

    Raises:
        DataError: the directory lacks that shape, or the two parts have different classes.
    """
    options = read_options(FolderOptions, spec)
    import_extra("PIL.Image", "images", "Reading a folder of images")
    root = folder_of(spec)
    test_folder = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if (root / "train").is_dir() and test_folder is None:
        raise DataError(f"{root} has train/ but neither val/ nor test/; add one, or give class folders alone.")
    if test_folder is not None:
        train, test = _classes(root / "train"), _classes(test_folder)
        if odd := sorted(set(train) ^ set(test)):
            raise DataError(f"The class {odd[0]!r} is in only one of train/ and {test_folder.name}/ of {root}.")
    else:
        everything = _classes(root)
        train = {name: [file for file in files if not _is_test(file)] for name, files in everything.items()}
        test = {name: [file for file in files if _is_test(file)] for name, files in everything.items()}
    if not any(train.values()) or not any(test.values()):
        raise DataError(f"{root} has too few images to set a tenth apart for testing; split them into train/ and val/.")
    return _images(train, options.image_size), _images(test, options.image_size)


def _classes(folder: Path) -> dict[str, list[Path]]:
    """Class name -> its image files at any depth, both in sorted order. Raises `DataError` where there are none."""
    classes = sorted(path for path in folder.glob("[!.]*") if path.is_dir())
    found = {
        one.name: sorted(path for path in one.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES) for one in classes
    }
    if not found:
        raise DataError(f"{folder} has no subfolders; expected one for each class, with its images.")
    if empty := [name for name, files in found.items() if not files]:
        raise DataError(f"{folder / empty[0]} has no images ({', '.join(sorted(IMAGE_SUFFIXES))}); add some.")
    return found


def _is_test(file: Path) -> bool:
    """One file in ten, by a hash of its name: a file stays in the same split when other files are added or removed."""
    digest = hashlib.sha256(f"{file.parent.name}/{file.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def _images(files: dict[str, list[Path]], image_size: int) -> FolderImages:
    labels = [label for label, name in enumerate(files) for _ in files[name]]
    return FolderImages(list(itertools.chain(*files.values())), labels, tuple(files), image_size)


def _middle_box(width: int, height: int) -> Box:
    """The largest square in the middle."""
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(width: int, height: int) -> Box:
    """A random region of 8 … 100 % of the area, sides in a ratio of 3:4 … 4:3 (Szegedy et al. 2015, section 6)."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, top, left + w, top + h
    return _middle_box(width, height)


def _flip_and_cut(pixels: NDArray[np.float32], augmentation: Augmentation) -> NDArray[np.float32]:
    """`pixels` (H, W, 3), flipped and cut out by draws from `random`."""
    if augmentation.flip and random.random() < 0.5:
        pixels = pixels[:, ::-1].copy()
    if (size := augmentation.cutout_size) is not None:
        height, width = pixels.shape[:2]
        top, left = random.randrange(height) - size // 2, random.randrange(width) - size // 2
        pixels[max(0, top) : max(0, top + size), max(0, left) : max(0, left + size)] = 0
    return pixels
