"""Arguments of public functions: what is not as its annotation says, or out of bounds, is named in one sentence."""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.errors import JobError, shortened, shown
from paceline.spec.job import MOST_SAMPLES, MOST_WORKERS

P = ParamSpec("P")
R = TypeVar("R")

Say = Callable[[str], None]
"""Receives progress messages of a workflow, one line at a time; such as `print`."""

_BOUNDS: Mapping[str, tuple[int, int]] = {
    "budget": (1, 10**9),
    "efficiency_floor": (0, 1),
    "link_rate": (1, 10**18),
    "max_restarts": (0, MOST_SAMPLES),
    "noise_scale": (1, 10**18),
    "pick": (-MOST_SAMPLES, MOST_SAMPLES),
    "target_samples": (1, 10**18),
    "tolerance": (0, 1),
}
"""The least and the most of numbers by their names."""
_BOUNDS_OF_COUNTS, _BOUNDS_OF_AMOUNTS = (1, MOST_SAMPLES), (0, 10**18)
"""Of other whole numbers, and of others."""


def silent(_line: str) -> None:
    """Discards the message."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the function raises `JobError` for an argument of another type than its annotation says, and for a
    number out of bounds."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def with_checked(*args: P.args, **kwargs: P.kwargs) -> R:
        types = parameter_types(function)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            kinds = members_of(types[name])
            if {Callable, str} <= {get_origin(one) or one for one in kinds}:
                continue  # a model or a data set that workers would have to import: the function says how
            listed = [one for kind in kinds for one in (kind, *get_args(kind)) if get_origin(one) is Literal]
            choices = [repr(choice) for one in listed for choice in get_args(one)]
            if not any(_is_of(value, one) for one in kinds):
                wanted = (
                    f"one of {', '.join(choices)}"
                    if choices
                    else function.__annotations__[name].removesuffix(" | None")
                )
                raise JobError(f"{name} = {shown(value)} should be {wanted}.")
            bounds = _BOUNDS.get(name, _BOUNDS_OF_COUNTS if int in kinds else _BOUNDS_OF_AMOUNTS)
            if isinstance(value, numbers.Real) and not bounds[0] <= float(value) <= bounds[1]:
                raise JobError(f"{name} = {shown(value)} should be a number from {bounds[0]} to {bounds[1]:,}.")
        return function(*args, **kwargs)

    return with_checked


@functools.cache
def parameter_types(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The types of a function's parameters; that of its result may be one that is not loaded."""
    named = {name: kind for name, kind in function.__annotations__.items() if name != "return"}
    return get_type_hints(SimpleNamespace(__annotations__=named), vars(sys.modules[function.__module__]))


def members_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union; of another type that alone."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(member for one in get_args(hint) for member in members_of(one))
    return (hint,)


def _is_of(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    if kind is Sequence:
        is_list = isinstance(value, Collection) and not isinstance(value, str)
        return is_list and all(any(_is_of(item, one) for one in members_of(get_args(hint)[0])) for item in value)
    if kind is Path:
        return isinstance(value, str | os.PathLike)
    if kind is Literal:
        return isinstance(value, str) and value in get_args(hint)
    return kind is Any or isinstance(value, kind)


def read_counts(name: str, given: Sequence[int] | str) -> list[int]:
    """Numbers, or a text such as "1..4,8", ascending and once each; long ranges are thinned out.

    Raises:
        JobError: something else; names the argument.
    """
    counts: set[int] = set()
    for part in (given if isinstance(given, str) else ",".join(map(str, given))).split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:\.\.\s*([0-9]{1,9})\s*)?", part)
        first, last = (0, 0) if ends is None else (int(ends[1]), int(ends[2] or ends[1]))
        if not 1 <= first <= last <= MOST_WORKERS:
            raise JobError(f"{name} = {shortened(str(given))} should be counts such as 1,2,4 or a range such as 1..64.")
        counts.add(first)
        if first < last:
            from paceline.plan.forecast import counts_between  # NumPy

            counts.update(counts_between(first, last))
    return sorted(counts)


def read_price(price: float | str | None) -> tuple[float | None, str]:
    """The amount and the currency of 2.5, "2.5" or "2.5 USD"; an empty currency where none is given.

    Raises:
        JobError: it is not an amount of 0 or more, with a currency or without.
    """
    if price is None:
        return None, ""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) ?(\D{0,8})", str(price).strip())
    if found is None:
        raise JobError(f"price = {shown(price)} should be an amount and its currency, such as '2.5 USD'.")
    return float(found[1]), found[2]
