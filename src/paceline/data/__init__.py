"""Data sets, and how samples reach the device: whole arrays where they fit, torch's loader where not."""

from __future__ import annotations

from paceline.data.arrays import ArrayReader as ArrayReader
from paceline.data.arrays import ArraySet as ArraySet
from paceline.data.loading import Loading as Loading
from paceline.data.loading import set_size as set_size
from paceline.data.randomness import Purpose as Purpose
from paceline.data.sample_reader import SampleRequest as SampleRequest
from paceline.data.sample_reader import read_samples as read_samples
from paceline.data.sources import SOURCES as SOURCES
from paceline.data.sources import load as load
from paceline.data.sources import source as source
