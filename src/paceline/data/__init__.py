"""Data sets, and how samples reach the device: whole arrays where they fit, torch's loader where not."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, cast

from torch.utils.data import Subset

from paceline.data.arrays import ArrayReader, ArraySet
from paceline.data.augment import Augmentation
from paceline.data.folder import FolderImages, load_folder
from paceline.data.loading import Loading, set_size
from paceline.data.randomness import Purpose
from paceline.data.sample_reader import MapDataset, SampleRequest, read_samples
from paceline.data.sources import (
    load_cifar10,
    load_cifar100,
    load_digits,
    load_fashion_mnist,
    load_mnist,
    load_text,
)
from paceline.errors import DataError, did_you_mean
from paceline.import_path import imported
from paceline.spec import DataSpec

__all__ = [
    "SOURCES",
    "ArrayReader",
    "ArraySet",
    "Augmentation",
    "FolderImages",
    "Loading",
    "Purpose",
    "SampleRequest",
    "load",
    "read_samples",
    "set_size",
]

SOURCES: dict[str, Callable[[DataSpec], tuple[MapDataset, MapDataset]]] = {
    "digits": load_digits,
    "mnist": load_mnist,
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
    "cifar100": load_cifar100,
    "folder": load_folder,
    "text": load_text,
}


def load(spec: DataSpec | str) -> tuple[MapDataset, MapDataset]:
    """The training and the test set that `spec` describes, limits and augmentation applied.

    Args:
        spec: or just a name: "digits", or "package.module:build".

    Raises:
        DataError: no such data set, files missing or damaged, an optional package missing.
        JobError: options that the data set does not take.
    """
    spec = DataSpec(spec) if isinstance(spec, str) else spec
    train, test = source(spec.name)(spec)
    train, test = _limited(train, spec.train_limit), _limited(test, spec.test_limit)
    if not spec.augment:
        return train, test
    if isinstance(train, FolderImages) or (isinstance(train, ArraySet) and train.mean is not None):
        return dataclasses.replace(train, augment=Augmentation.from_spec(spec)), test
    raise DataError(
        f"data.augment = {list(spec.augment)} cannot be applied to {spec.name!r}, which does not give raw images; "
        "leave it empty and augment inside the data set."
    )


def source(name: str) -> Callable[[DataSpec], tuple[MapDataset, MapDataset]]:
    """What loads the data set of a name or an import path. Raises `DataError` for a name that is none."""
    if ":" in name:
        return _from_import_path
    if name in SOURCES:
        return SOURCES[name]
    raise DataError(
        f"There is no data set {name!r}: {did_you_mean(name, SOURCES)}The names are {', '.join(SOURCES)}; your own is "
        "given by its import path, 'package.module:build'."
    )


def _limited(dataset: MapDataset, limit: int | None) -> MapDataset:
    if limit is None or limit >= len(dataset):
        return dataset
    if isinstance(dataset, ArraySet | FolderImages):
        return dataset.take(limit)
    return Subset(cast(Any, dataset), range(limit))  # torch asks for its own base class and uses none of it


def _from_import_path(spec: DataSpec) -> tuple[MapDataset, MapDataset]:
    build = imported(spec.name, "data.name", DataError)
    if "split" in inspect.signature(build).parameters:
        pair: Any = build("train", **spec.options), build("test", **spec.options)
    else:
        pair = build(**spec.options)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(
            f"{spec.name} returned {type(pair).__name__}; it should take an argument 'split' and return one "
            "data set, or take none and return two, (train, test)."
        )
    for dataset in pair:
        set_size(dataset, f"The data set that {spec.name} returned")
    return pair[0], pair[1]
