"""Arguments of public functions and fields of their options: where a type is not what the annotation says, a sentence
names the argument."""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.errors import JobError, shown

P = ParamSpec("P")
R = TypeVar("R")

_NAMES: Mapping[Any, str] = {
    NoneType: "None",
    str: "a text",
    Path: "a path",
    int: "a whole number",
    float: "a number",
    Callable: "a function",
    Sequence: "a list",
    Iterable: "a list",
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the function raises `JobError` for an argument of another type than its annotation says.

    Items of lists, and whether a number or a text is one that can be used, are left to the function.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def with_checked(*args: P.args, **kwargs: P.kwargs) -> R:
        _check(signature.bind(*args, **kwargs).arguments, parameter_types(function))
        return function(*args, **kwargs)

    return with_checked


def check_fields(options: Any) -> None:
    """Raise `JobError` for a field of a dataclass that is of another type than its annotation says."""
    _check(vars(options), get_type_hints(type(options)))


def _check(values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    for name, value in values.items():
        members = _members(types[name])
        if {Callable, str} <= {get_origin(one) or one for one in members}:
            continue  # a model or a data set that workers would have to import: the function says how
        if not any(_is_of(value, one) for one in members):
            wanted = list(dict.fromkeys(_name(one) for one in members))
            raise JobError(f"{name} = {shown(value)} should be {' or '.join(wanted)}.")


@functools.cache
def parameter_types(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The types of a function's parameters; that of its result may be one that is not loaded."""
    named = {name: kind for name, kind in function.__annotations__.items() if name != "return"}
    return get_type_hints(SimpleNamespace(__annotations__=named), vars(sys.modules[function.__module__]))


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, UnionType):
        return tuple(member for one in get_args(hint) for member in _members(one))
    return (hint,)


def _is_of(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if kind in (int, float):  # what is no whole number is told with the numbers that there can be
        return isinstance(value, numbers.Real)
    if kind is Sequence:
        return isinstance(value, Iterable)
    if kind is Path:
        return isinstance(value, str | os.PathLike)
    if kind is Literal:
        return isinstance(value, str) and value in get_args(hint)
    return kind in (Any, bool) or not isinstance(kind, type) or isinstance(value, kind)


def _name(hint: Any) -> str:
    kind = get_origin(hint) or hint
    if kind is Literal:
        return " or ".join(map(repr, get_args(hint)))
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return _NAMES.get(kind) or f"{article} {kind.__name__}"
