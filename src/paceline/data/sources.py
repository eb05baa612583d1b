"""What the named data sets share: their options, the packages that they need, and labels as their files have them."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError, JobError
from paceline.spec import DataSpec
from paceline.spec.codec import from_mapping

T = TypeVar("T")


def read_options(cls: type[T], spec: DataSpec) -> T:
    """The dataclass `cls` from `data.options`; a key or value it cannot hold is a JobError."""
    return from_mapping(cls, spec.options, "data.options")


def no_options(spec: DataSpec) -> None:
    """Raises `JobError` if the user gave options to a source that has none."""
    for key in spec.options:
        raise JobError(f"There is no key 'data.options.{key}': the data set {spec.name!r} takes no options.")


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """The module, or a DataError that says which extra of ours brings it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(f"{purpose} needs {package}; install it with: pip install 'paceline[{extra}]'") from None


def checked_labels(labels: NDArray[Any], num_images: int, num_classes: int, where: str) -> NDArray[np.int64]:
    """A vector `labels` (n,) as int64.

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
