"""Packages that only some data sources need, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from paceline.errors import DataError


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """The module, or a DataError that says which extra of ours brings it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise DataError(f"{purpose} needs {package}; install it with: pip install 'paceline[{extra}]'") from None
