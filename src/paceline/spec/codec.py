"""Frozen dataclasses to plain mappings and JSON files and back, checked on the way in.

Whatever comes from outside is checked against the annotations of a dataclass: unknown keys, wrong types and values
outside the declared choices or bounds are a `JobError` whose sentence names the key, the value, and what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import numbers
import os
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.errors import InvalidFileError, JobError, PacelineError, did_you_mean, file_problems, shown
from paceline.files import replace_text

T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """The numbers that an annotated type allows, as in `Annotated[float, Bounds(low=0)]`; else all finite ones."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    may_diverge: bool = False
    """Whether NaN and infinity are allowed too, as in a loss."""

    def violation(self, value: float) -> str:
        """The bound that `value` does not keep, such as "at least 1"; empty: it keeps all."""
        if not math.isfinite(value):
            return "" if self.may_diverge else "a finite number"
        if value <= self.above:
            return f"greater than {self.above}"
        if value >= self.below:
            return f"below {self.below}"
        if value < self.low:
            return f"at least {self.low}"
        return f"at most {self.high}" if value > self.high else ""


NonNegativeInt = Annotated[int, Bounds(low=0)]
PositiveInt = Annotated[int, Bounds(low=1)]
NonNegativeFloat = Annotated[float, Bounds(low=0)]
PositiveFloat = Annotated[float, Bounds(above=0)]
UnitInterval = Annotated[float, Bounds(low=0, high=1)]
DivergingFloat = Annotated[float, Bounds(may_diverge=True)]


class JsonValue:
    """A frozen dataclass that is also a JSON file."""

    remedy: ClassVar[str] = ""
    """The advice about a file that cannot be read, where its reader gives no other."""
    error: ClassVar[type[PacelineError]] = InvalidFileError
    """The error that such a file raises."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """The value of plain dictionaries and lists. Raises `JobError` for unknown keys and invalid values."""
        return from_mapping(cls, mapping)

    @classmethod
    def from_json(cls, text: str | bytes, source: str, remedy: str = "") -> Self:
        """The value in a JSON text. Raises `error`, which names the `source` and the `remedy`, for any other text."""
        try:
            return cls.from_mapping(json.loads(text))
        except (ValueError, RecursionError, JobError) as problem:
            words = re.sub("(?<=.)[A-Z]", lambda letter: f" {letter[0]}", cls.__name__).lower()
            reason = str(problem).rstrip(".") if isinstance(problem, JobError) else f"not JSON ({problem})"
            remedy = remedy or cls.remedy
            raise cls.error(f"{source} cannot be read as a {words}: {reason}{remedy and '; '}{remedy}.") from None

    @classmethod
    def load(cls, path: Path, remedy: str = "") -> Self:
        """The value in a JSON file. Raises `error`, with the `remedy`, for one that is missing or damaged."""
        with file_problems(f"{path} cannot be read", cls.error, remedy or cls.remedy):
            content = path.read_bytes()
        return cls.from_json(content, str(path), remedy)

    def to_mapping(self) -> dict[str, Any]:
        """The value as nested plain dictionaries and tuples, fit for JSON."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    def save(self, path: Path, mode: int = 0o666) -> None:
        """Write the JSON file, complete or not at all; `mode`: its permissions, less those that the umask takes."""
        replace_text(path, json.dumps(self.to_mapping(), indent=1) + "\n", mode)


def from_mapping(cls: type[T], mapping: Mapping[str, Any], where: str = "") -> T:
    """Build the dataclass `cls` from `mapping`; `where` is the dotted path used in error sentences."""
    if not isinstance(mapping, Mapping):
        raise JobError(f"{where or 'The content'} = {shown(mapping)} should be a table, in Python a dict.")
    kinds = _kinds(cls)  # type: ignore[arg-type]
    for key in mapping:
        if key not in kinds:
            hint, keys = did_you_mean(str(key), kinds), ", ".join(sorted(kinds))
            raise JobError(f"There is no key {shown(_path(where, key))}: {hint}The keys here are {keys}.")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        has_default = field.default is not MISSING or field.default_factory is not MISSING
        if field.name not in mapping and (not has_default or "in_every_file" in field.metadata):
            raise JobError(f"The key '{_path(where, field.name)}' is missing; give it a value.")
    return cls(**{key: checked(kinds[key], raw, _path(where, key)) for key, raw in mapping.items()})


def check_values(value: Any, where: str = "") -> None:
    """Check a new dataclass made in Python as `from_mapping` checks one made of a mapping, and give its attributes the
    types that they have there: a list becomes a tuple, a table a dataclass. Raises `JobError`."""
    for name, kind in _kinds(type(value)).items():  # type: ignore[arg-type]
        object.__setattr__(value, name, checked(kind, getattr(value, name), _path(where, name)))


def _path(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields; cached, since to resolve annotations takes longer than a small mapping."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def checked(kind: Any, raw: Any, path: str) -> Any:
    """`raw` as a value of the type `kind`. Raises `JobError`, which names the `path`, for one that does not fit."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        value = "none" if raw is None else raw  # on a command line both are written none
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in args):
            return value
        hint = did_you_mean(raw, map(str, args), " ({})") if isinstance(raw, str) else ""
        raise JobError(f"{path} = {shown(raw)} is not possible{hint}; it is {in_words(kind)}.")
    if origin in (Union, types.UnionType):
        members = [one for one in args if one is not type(None)]
        if raw is None and len(members) < len(args):
            return None
        if len(members) == 1 or type(raw) in members:  # a text is no path where it may be a text
            return checked(type(raw) if type(raw) in members else members[0], raw, path)
        for one in members:
            with contextlib.suppress(JobError):
                return checked(one, raw, path)
    elif origin in _LISTS and isinstance(raw, Iterable) and not isinstance(raw, str | Mapping):
        items = [*raw]
        kinds = args if origin is tuple and args[-1] is not Ellipsis else args[:1] * len(items)
        if len(kinds) != len(items):
            raise JobError(f"{path} = {shown(raw)} should be a list of {len(kinds)}.")
        return tuple(checked(kinds[i], item, f"{path}[{i}]") for i, item in enumerate(items))
    elif origin is dict and isinstance(raw, Mapping):
        return {str(key): checked(args[1], item, f"{path}.{key}") for key, item in raw.items()}
    elif isinstance(origin, type) and dataclasses.is_dataclass(origin):
        if isinstance(raw, str) and getattr(origin, "may_be_a_name", False):
            raw = {"name": raw}
        if isinstance(raw, Mapping):
            return from_mapping(origin, raw, path)
        if isinstance(raw, origin):
            check_values(raw, path)
            return raw
    elif origin in (int, float, Annotated):
        number, bounds = args if args else (kind, Bounds())
        if not isinstance(raw, bool) and isinstance(raw, numbers.Integral if number is int else numbers.Real):
            if violation := bounds.violation(raw):
                raise JobError(f"{path} = {shown(raw)} should be {violation}.")
            return number(raw)
    elif origin is Path and isinstance(raw, str | os.PathLike):
        return Path(raw)
    elif kind is Any or (origin not in _LISTS and isinstance(raw, origin)):
        return [*raw] if kind is Any and isinstance(raw, tuple) else raw  # as JSON has it
    raise JobError(f"{path} = {shown(raw)} should be {in_words(kind)}.")


def in_words(kind: Any) -> str:
    """The values of a type, as a sentence or a table says them: "a whole number, at least 1"."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(repr(one).lower() if isinstance(one, bool) else repr(one) for one in args)}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_words(one) for one in args if one is not type(None)))
    if origin is Annotated:
        limits = ((words, getattr(args[1], name)) for name, words in _BOUNDS.items())
        return ", ".join([in_words(args[0]), *(f"{words} {n}" for words, n in limits if abs(n) < _LARGEST_BOUND)])
    if origin is tuple and args[1:] == (...,):
        return f"a list, each {in_words(args[0])}"
    named = "a table" if origin.__name__.endswith("Spec") else _WORDS.get(origin)  # users know no class behind it
    return named or f"a {origin.__name__}{' or a table' * dataclasses.is_dataclass(origin)}"


_LISTS: tuple[Any, ...] = (tuple, Sequence, Iterable)
_BOUNDS = {"low": "at least", "above": "above", "high": "at most", "below": "below"}
_LARGEST_BOUND = 2**20
"""Nobody meets a larger one: it is not said."""
_WORDS: dict[Any, str] = {
    **dict.fromkeys(_LISTS, "a list"),
    dict: "a table",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    Path: "a path",
}
