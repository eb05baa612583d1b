"""A folder of images, one subfolder a class; for sets larger than memory, decoded sample by sample."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.data.augment import Augmentation
from paceline.data.sources import import_extra, read_options
from paceline.errors import DataError
from paceline.spec import DataSpec
from paceline.spec.codec import at_least

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's images per channel, with values scaled to 0 … 1."""


@dataclass(frozen=True)
class FolderOptions:
    image_size: int = at_least(1, 224)
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

        path = self.files[index]
        try:
            with open(path, "rb") as file, Image.open(file) as picture:
                image = picture.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} is not a readable image ({error}); repair or remove it.") from None
        crop = self.augment is not None and self.augment.crop_padding is not None
        box = _random_box(image.size) if crop else _middle_box(image.size)
        resized = image.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR, box=box)
        pixels = np.array(resized, np.uint8)
        if self.augment is not None:
            pixels = _flip_and_cut(pixels, self.augment)
        mean, std = np.array(MEAN, np.float32), np.array(STD, np.float32)
        normalised = (pixels.astype(np.float32) / 255 - mean) / std
        return torch.from_numpy(np.ascontiguousarray(normalised.transpose(2, 0, 1))), self.labels[index]


def load_folder(spec: DataSpec) -> tuple[FolderImages, FolderImages]:
    """`data.dir` with train/ and val/ (or test/) of class folders; or class folders alone, of which a tenth
    is test.

    Raises:
        DataError: the directory lacks that shape, or the two parts have different classes.
    """
    options = read_options(FolderOptions, spec)
    import_extra("PIL.Image", "images", "Reading a folder of images")
    if spec.dir is None:
        raise DataError(
            "The data set 'folder' needs data.dir: a directory with one subfolder of images for each class."
        )
    root = Path(spec.dir).expanduser()
    if not root.is_dir():
        raise DataError(f"data.dir = {spec.dir!r} is not a directory; give one with a subfolder for each class.")
    train_dir = root / "train"
    test_dir = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if train_dir.is_dir() and test_dir is not None:
        train, test = _scan(train_dir), _scan(test_dir)
        if sorted(train) != sorted(test):
            odd = sorted(set(train) ^ set(test))[0]
            raise DataError(f"The class {odd!r} is in only one of {train_dir} and {test_dir}; both need every class.")
    elif train_dir.is_dir():
        raise DataError(f"{root} has train/ but neither val/ nor test/; add one, or give class folders alone.")
    else:
        everything = _scan(root)
        train = {name: [path for path in paths if not _is_test(path)] for name, paths in everything.items()}
        test = {name: [path for path in paths if _is_test(path)] for name, paths in everything.items()}
        if not any(train.values()) or not any(test.values()):
            raise DataError(
                f"{root} has too few images to set a tenth apart for testing; split them into train/ and val/."
            )
    return _images(train, options.image_size), _images(test, options.image_size)


def _scan(directory: Path) -> dict[str, list[Path]]:
    """Class name -> its image files at any depth, both in sorted order."""
    classes = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = {
        folder.name: sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        for folder in classes
    }
    if not found:
        raise DataError(f"{directory} has no subfolders; expected one for each class, with its images.")
    for name, paths in found.items():
        if not paths:
            raise DataError(
                f"{directory / name} has no images ({', '.join(sorted(IMAGE_SUFFIXES))}); add some or remove it."
            )
    return found


def _is_test(path: Path) -> bool:
    """One file in ten, by a hash of its name: a file stays in the same split when other files are added or removed."""
    digest = hashlib.sha256(f"{path.parent.name}/{path.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def _images(files: dict[str, list[Path]], image_size: int) -> FolderImages:
    labelled = [(path, label) for label, name in enumerate(files) for path in files[name]]
    return FolderImages(
        files=tuple(path for path, _ in labelled),
        labels=tuple(label for _, label in labelled),
        classes=tuple(files),
        image_size=image_size,
    )


Box = tuple[float, float, float, float]


def _middle_box(size: tuple[int, int]) -> Box:
    """(left, top, right, bottom) of the largest square in the middle."""
    width, height = size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(size: tuple[int, int]) -> Box:
    """A random region of 8 … 100 % of the area with sides in a ratio of 3:4 … 4:3 (Szegedy et al. 2015, section
    6)."""
    width, height = size
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, top, left + w, top + h
    return _middle_box(size)


def _flip_and_cut(pixels: Any, augmentation: Augmentation) -> Any:
    """`pixels` (H, W, 3), flipped and cut out by draws from `random`."""
    if augmentation.flip and random.random() < 0.5:
        pixels = pixels[:, ::-1].copy()
    if augmentation.cutout_size is not None:
        height, width = pixels.shape[:2]
        half = augmentation.cutout_size // 2
        top, left = random.randrange(height) - half, random.randrange(width) - half
        size = augmentation.cutout_size
        pixels[max(0, top) : max(0, top + size), max(0, left) : max(0, left + size)] = 0
    return pixels
