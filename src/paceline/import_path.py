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
    return any(parameter.name == name for parameter in _parameters(function) or ())


def checked_options(
    function: Callable[..., Any], options: dict[str, Any], who: str, where: str, num_given: int = 0
) -> dict[str, Any]:
    """`options` if `function` takes them all besides its first `num_given` arguments, and needs no others.

    Raises:
        JobError: one that it does not have, of which the nearest that it has is named, or one that is missing.
    """
    parameters = _parameters(function)
    if parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return options
    own = {one.name: one for one in parameters[num_given:] if one.kind is not one.VAR_POSITIONAL}
    for name in options:
        if name not in own:
            hint = did_you_mean(name, own)
            raise JobError(f"{where}: {who} has no option {name!r}: {hint}It has {', '.join(own) or 'none'}.")
    if not num_given:
        for name, parameter in own.items():
            if parameter.default is parameter.empty and name not in options:
                raise JobError(f"{where}: {who} needs the option {name!r}.")
    return options


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function or class; None if it is written in C and does not show them."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None
