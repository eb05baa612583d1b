"""Arguments of public functions: one that is not as its annotation says, or out of its bounds, is one sentence."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.errors import JobError, shortened, shown
from paceline.spec import codec
from paceline.spec.job import MOST_WORKERS

_MOST_IN_FULL = 64
"""A range of so many device counts has all of them."""

P = ParamSpec("P")
R = TypeVar("R")

Say = Callable[[str], None]
"""Receives progress messages of a workflow, one line at a time; such as `print`."""


def silent(_line: str) -> None:
    """Discards the message."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the function raises `JobError` for an argument that its annotation does not allow, and is given the
    others in the types there: a text as a path, a list as a tuple."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def with_checked(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds, bound = parameter_types(function), signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            bound.arguments[name] = codec.checked(kinds[name], value, name)
        return function(*bound.args, **bound.kwargs)

    return with_checked


@functools.cache
def parameter_types(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The types of a function's parameters, with their bounds; that of its result may be one that is not loaded."""
    named = {name: kind for name, kind in function.__annotations__.items() if name != "return"}
    module = vars(sys.modules[function.__module__])
    return get_type_hints(SimpleNamespace(__annotations__=named), module, include_extras=True)


def members_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, without bounds; of another type that alone."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(member for one in get_args(hint) for member in members_of(one))
    return (get_args(hint)[0] if get_origin(hint) is Annotated else hint,)


def field_meanings(table: type) -> dict[str, str]:
    """The string below each attribute of a class, which Python itself does not keep."""
    (body,) = ast.parse(inspect.getsource(table)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for attribute, below in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name):
            value = below.value if isinstance(below, ast.Expr) else None
            text = str(value.value) if isinstance(value, ast.Constant) else ""
            found[attribute.target.id] = inspect.cleandoc(text).replace("\n", " ")
    return found


def read_counts(name: str, given: Sequence[int] | str) -> list[int]:
    """Numbers, or a text such as "1..4,8", ascending and once each; of a long range the first 64, then four for each
    doubling, and the last. Raises `JobError` for something else; it has the argument's `name`."""
    counts: set[int] = set()
    for part in (given if isinstance(given, str) else ",".join(map(str, given))).split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:\.\.\s*([0-9]{1,9})\s*)?", part)
        first, last = (0, 0) if ends is None else (int(ends[1]), int(ends[2] or ends[1]))
        if not 1 <= first <= last <= MOST_WORKERS:
            raise JobError(f"{name} = {shortened(str(given))} should be counts such as 1,2,4 or a range such as 1..64.")
        own = list(range(first, min(last, first + _MOST_IN_FULL - 1) + 1))
        while own[-1] < last:
            step = max(1, (1 << (own[-1].bit_length() - 1)) // 4)
            own.append(min(last, (own[-1] // step + 1) * step))
        counts.update(own)
    return sorted(counts)


def read_price(price: float | str | None) -> tuple[float | None, str]:
    """The amount and the currency of 2.5, "2.5" or "2.5 USD"; an empty currency where none is given. Raises `JobError`
    for something else."""
    if price is None:
        return None, ""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?) ?(\D{0,8})", str(price).strip())
    if found is None:
        raise JobError(f"price = {shown(price)} should be an amount and its currency, such as '2.5 USD'.")
    return float(found[1]), found[2]
