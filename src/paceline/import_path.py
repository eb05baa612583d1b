"""What an import path "package.module:name" in a job names, and the options it takes."""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any

from paceline.errors import JobError, PacelineError, did_you_mean


def imported(path: str, key: str, error: type[PacelineError] = JobError) -> Callable[..., Any]:
    """The function or class behind an import path.

    Args:
        key: the key of the job that names it, for the error.
        error: what is raised where it is not an import path, or there is no such module or name.
    """
    module_name, _, attribute = path.partition(":")
    if not attribute or not all(part.isidentifier() for part in f"{module_name}.{attribute}".split(".")):
        raise error(f"{key} = {path!r} is not an import path; write it as 'package.module:name'.")
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module_name))
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


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function or class has a parameter of this name."""
    return name in inspect.signature(function).parameters


def checked_options(
    function: Callable[..., Any], options: dict[str, Any], who: str, where: str, num_given: int = 0
) -> dict[str, Any]:
    """`options` if `function` takes them besides its first `num_given` arguments, and, where these are none, needs no
    others. Raises `JobError` for others."""
    signature = inspect.signature(function)
    bind = signature.bind_partial if num_given else signature.bind
    try:
        bind(*[None] * num_given, **options)
    except TypeError as problem:
        own = list(signature.parameters)[num_given:]
        hint = "".join(did_you_mean(name, own) for name in options if name not in own)
        raise JobError(f"{where}: {who}: {problem}; {hint}its options are {', '.join(own) or 'none'}.") from None
    return options
