"""What an import path "package.module:name" in a job names."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

from paceline.errors import JobError


def imported(path: str, key: str) -> Callable[..., Any]:
    """The function or class behind an import path.

    Args:
        key: the key of the job that names it, for the error.

    Raises:
        JobError: it is no import path, or there is no such module or name.
    """
    module_name, _, attribute = path.partition(":")
    if not attribute or not all(part.isidentifier() for part in f"{module_name}.{attribute}".split(".")):
        raise JobError(f"{key} = {path!r} is no import path; write it as 'package.module:name'.")
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module_name))
    except ModuleNotFoundError as problem:
        # A module that is missing inside the user's own code is their bug and keeps its traceback.
        if problem.name is None or not f"{module_name}.".startswith(f"{problem.name}."):
            raise
        raise JobError(
            f"{key} = {path!r}: there is no module {problem.name!r}; install it or put its directory on PYTHONPATH."
        ) from None
    except AttributeError:
        raise JobError(f"{key} = {path!r}: the module {module_name!r} has no {attribute!r}.") from None
    if not callable(found):
        raise JobError(f"{key} = {path!r} should name a function or class, not a {type(found).__name__}.")
    return found  # type: ignore[no-any-return]
