"""Class labels as the files have them, checked before anything is trained on them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError


def checked_labels(labels: NDArray[Any], num_images: int, num_classes: int, where: str) -> NDArray[np.int64]:
    """`labels` (n,) as int64.

    Raises:
        DataError: their number is not `num_images`, or one lies outside 0 … num_classes - 1; names `where`.
    """
    if len(labels) != num_images:
        raise DataError(f"{where} has {len(labels)} labels for {num_images} images; download the file again.")
    outside = (labels < 0) | (labels >= num_classes)
    if outside.any():
        first = int(outside.argmax())
        raise DataError(
            f"{where} has label {labels[first]} at position {first}; labels lie in 0 … {num_classes - 1}: "
            "the file is damaged or belongs to another data set."
        )
    return labels.astype(np.int64)
