"""What the named data sets share: their options, their folder, and the packages that they need."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import DataError
from paceline.spec import DataSpec
from paceline.spec.codec import from_mapping

T = TypeVar("T")


@dataclass(frozen=True)
class NoOptions:
    """Of a data set that takes none."""


def read_options(cls: type[T], spec: DataSpec) -> T:
    """The dataclass `cls` from `data.options`; a key or value it cannot hold is a JobError."""
    return from_mapping(cls, spec.options, "data.options")


def folder_of(spec: DataSpec) -> Path:
    """The user's folder `data.dir`. Raises `DataError` where there is none."""
    if spec.dir is None or not Path(spec.dir).expanduser().is_dir():
        raise DataError(f"data.dir = {spec.dir!r} is not a directory; give the one with the files of {spec.name}.")
    return Path(spec.dir).expanduser()


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """The module, or a DataError that says which extra of ours brings it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(f"{purpose} needs {package}; install it with: pip install 'paceline[{extra}]'") from None
