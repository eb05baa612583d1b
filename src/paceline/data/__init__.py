"""Data sets, and how samples reach the device: whole arrays where they fit, torch's loader where not."""

from __future__ import annotations

from paceline.data.arrays import ArrayReader, ArraySet
from paceline.data.augment import Augmentation
from paceline.data.folder import FolderImages
from paceline.data.loading import Loading, set_size
from paceline.data.randomness import Purpose
from paceline.data.sample_reader import SampleRequest, read_samples
from paceline.data.sources import SOURCES, load, source

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
    "source",
]
