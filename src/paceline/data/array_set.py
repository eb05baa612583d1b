"""`ArraySet`: a data set in whole arrays, so that a batch is one gather and not a loop over samples."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.augment import Augmentation
from paceline.errors import DataError


@dataclass(frozen=True, eq=False)
class ArraySet:
    """Samples `inputs[i]`, `targets[i]`, for images or for tokens.

    Images: `inputs` uint8 (n, C, H, W), usually a read-only memory map; `targets` integers (n,); `mean` and
    `std` per channel in the scale where 255 is 1.
    Tokens: `inputs` integers (n, L), `targets` integers (n, L), `mean` and `std` None. Any integer type will
    do; a batch is int64 whatever the storage.

    Raises:
        DataError: inputs and targets differ in length, or mean and std do not fit the channels.
    """

    inputs: NDArray[Any]
    targets: NDArray[Any]
    num_classes: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    augment: Augmentation | None = None
    """What training applies to this set; evaluation never does."""

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise DataError(
                f"An array set has {len(self.inputs)} inputs and {len(self.targets)} targets; give each input one."
            )
        if self.mean is None or self.std is None:
            if self.mean is not self.std or self.augment is not None:
                raise DataError("An array set of images needs both mean and std; one of tokens has no augmentation.")
        elif self.inputs.ndim != 4 or not self.inputs.shape[1] == len(self.mean) == len(self.std):
            raise DataError(
                "An array set of images has inputs of shape (n, channels, height, width), not "
                f"{self.inputs.shape}, and one mean and std per channel, not {len(self.mean)} and "
                f"{len(self.std)}."
            )

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

    def take(self, limit: int) -> ArraySet:
        """The first `limit` samples, or all when there are fewer; the arrays are not copied."""
        return dataclasses.replace(self, inputs=self.inputs[:limit], targets=self.targets[:limit])
