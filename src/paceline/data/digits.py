"""The data set inside the package: 1,797 handwritten digits, so that everything runs without a network.

They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, licensed CC BY 4.0. `digits.npz` holds the 8 x 8
images (0 … 16, the count of dark pixels in a 4 x 4 block of the scan) and labels in their original order,
unchanged.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
from numpy.typing import NDArray

from paceline.data.arrays import ArraySet
from paceline.data.sources import NoOptions, read_options
from paceline.spec import DataSpec

MEAN, STD = (0.2247,), (0.3497,)


def load_digits(spec: DataSpec) -> tuple[ArraySet, ArraySet]:
    """Images 1 x 28 x 28, the size that nets for MNIST take; every fifth image is for testing."""
    read_options(NoOptions, spec)
    with resources.as_file(resources.files("paceline.data") / "digits.npz") as path, np.load(path) as file:
        images, labels = _enlarged(file["images"]), file["labels"].astype(np.int64)
    test = np.arange(len(images)) % 5 == 4
    return (
        ArraySet(images[~test], labels[~test], 10, MEAN, STD),
        ArraySet(images[test], labels[test], 10, MEAN, STD),
    )


def _enlarged(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(n, 8, 8) in 0 … 16 to (n, 1, 28, 28) in 0 … 255: each pixel becomes 3 x 3, with a border of 2."""
    pixels = np.rint(images.astype(np.float32) * (255 / 16)).astype(np.uint8)
    large = pixels.repeat(3, axis=1).repeat(3, axis=2)
    return np.pad(large, ((0, 0), (2, 2), (2, 2)))[:, None]
