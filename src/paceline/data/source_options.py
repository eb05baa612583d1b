"""`data.options`: what a single source takes beyond what all sources take."""

from __future__ import annotations

from typing import TypeVar

from paceline.errors import JobError
from paceline.spec import DataSpec
from paceline.spec.codec import from_mapping

T = TypeVar("T")


def read_options(cls: type[T], spec: DataSpec) -> T:
    """The dataclass `cls` from `spec.options`; a key or value it cannot hold is a JobError."""
    return from_mapping(cls, spec.options, "data.options")


def no_options(spec: DataSpec) -> None:
    """Raises:
    JobError: the user gave options to a source that has none.
    """
    for key in spec.options:
        raise JobError(f"There is no key 'data.options.{key}': the data set {spec.name!r} takes no options.")
