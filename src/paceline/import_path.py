"""What an import path "package.module:name" in a job names."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from typing import Any

from paceline.errors import JobError, PacelineError


def import_by_path(path: str, key: str, error: type[PacelineError] = JobError) -> Callable[..., Any]:
    """The function or class behind an import path.

    Args:
        key: the key of the job that names it, for the error.
        error: what is raised where it is not an import path, or there is no such module or name.
    """
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", path):
        raise error(f"{key} = {path!r} is not an import path; write it as 'package.module:name'.")
    module_name, _, attribute = path.partition(":")
    try:
        found = pkgutil.resolve_name(path)
    except ModuleNotFoundError as problem:
        # A module that is missing inside the user's own code is their bug and keeps its traceback.
        if problem.name is None or not f"{module_name}.".startswith(f"{problem.name}."):
            raise
        raise error(
            f"{key} = {path!r}: there is no module {problem.name!r}; install it or put its directory on PYTHONPATH."
        ) from None
    except AttributeError:
        raise error(f"{key} = {path!r}: the module {module_name!r} has no {attribute!r}.") from None
    if not callable(found):
        raise error(f"{key} = {path!r} should name a function or class, not a {type(found).__name__}.")
    return found  # type: ignore[no-any-return]
