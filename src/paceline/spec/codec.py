"""Frozen dataclasses to plain mappings and back, checked on the way in.

A mapping from a user is checked against the dataclass: unknown keys, wrong types and values outside the declared
choices or bounds are a `JobError` whose sentence names the key, the value, and what is allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from paceline.errors import InvalidFileError, JobError, PacelineError, did_you_mean, shortened, shown
from paceline.regular_files import read_json, replace_text

T = TypeVar("T")

_TYPE_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    type(None): "nothing",
}


_LARGEST = 2**63
"""Whole numbers of more than 64 bits fit neither a tensor nor a file system."""

_DEEPEST = 20
"""Levels of tables and lists in a value of any type."""


def at_least(low: float, default: Any) -> Any:
    """A dataclass field whose numbers may not be below `low`."""
    return dataclasses.field(default=default, metadata={"low": low})


def between(low: float, high: float, default: Any) -> Any:
    """A dataclass field whose numbers lie in [low, high]."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def above_zero(default: Any) -> Any:
    """A dataclass field whose numbers are greater than 0."""
    return dataclasses.field(default=default, metadata=ABOVE_ZERO)


# Metadata of fields, with `dataclasses.field`.
NOT_NEGATIVE = types.MappingProxyType({"low": 0})
POSITIVE = types.MappingProxyType({"low": 1})
ABOVE_ZERO = types.MappingProxyType({"above": 0})
MAY_DIVERGE = types.MappingProxyType({"may_diverge": True})
"""Numbers that may be NaN or infinite, such as a loss; those of all other fields may not."""
PLAIN = types.MappingProxyType({"is_plain": True})
"""Keyword arguments for a function of the user: texts, numbers, tables and lists of these."""


class JsonValue:
    """A frozen dataclass that is also a JSON file."""

    json_indent: ClassVar[int | None] = 2
    """None: all on one line."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """The value of plain dictionaries and lists. Raises `JobError` for unknown keys and invalid values."""
        return from_mapping(cls, mapping)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The value in a JSON file. Raises `JobError`, which names the file, if there is none or it is damaged."""
        words = re.sub("(?<=.)[A-Z]", lambda letter: f" {letter[0]}", cls.__name__).lower()
        try:
            return cls.from_mapping(read_json(path))
        except OSError as problem:
            raise InvalidFileError(f"{path} cannot be read as a {words}: {problem.strerror}.") from None
        except (ValueError, JobError) as problem:
            raise InvalidFileError(f"{path} cannot be read as a {words}: {problem}") from None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The value in a JSON file; None where there is none that can be read."""
        try:
            return cls.load(path)
        except PacelineError:
            return None

    def to_mapping(self) -> dict[str, Any]:
        return to_mapping(self)

    def save(self, path: Path, mode: int = 0o666) -> None:
        """Write the JSON file, complete or not at all; `mode`: its permissions, less those that the umask takes."""
        replace_text(path, json.dumps(self.to_mapping(), indent=self.json_indent) + "\n", mode)


def to_mapping(value: Any) -> dict[str, Any]:
    """A dataclass as nested plain dictionaries and lists, fit for JSON and TOML."""
    return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in value]
    return value


ANY = object()
"""In `FORMER_KEYS` of a dataclass: whatever value the key had, it changes nothing.

These are keys of earlier releases, which records, checkpoints and measurements still have: for each the value that
changed nothing, which is passed over, and what stands in the key's place.
"""


def from_mapping(cls: type[T], mapping: Mapping[str, Any], where: str = "") -> T:
    """Build the dataclass `cls` from `mapping`; `where` is the dotted path used in error sentences."""
    hints = _hints(cls)  # type: ignore[arg-type]
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    former: Mapping[str, tuple[Any, str]] = getattr(cls, "FORMER_KEYS", {})
    values: dict[str, Any] = {}
    for key, raw in mapping.items():
        path = f"{where}.{key}" if where else str(key)
        if key in former:
            before, instead = former[key]
            if before is not ANY and raw != before:
                raise JobError(f"The key '{path}' is gone: {instead}")
            continue
        if key not in fields:
            raise JobError(_unknown_key(path, str(key), list(fields)))
        values[key] = _convert(hints[key], raw, path, fields[key].metadata)
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        path = f"{where}.{missing[0]}" if where else missing[0]
        raise JobError(f"The key '{path}' is missing; give it a value.")
    return cls(**values)


def check_values(value: Any, where: str = "") -> None:
    """Check a dataclass made in Python as `from_mapping` checks one made of a mapping; raises `JobError`."""
    for field in dataclasses.fields(value):
        path, item = f"{where}.{field.name}" if where else field.name, getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            check_values(item, path)
        else:
            hints = _hints(cast(Any, type(value)))
            _convert(hints[field.name], item, path, field.metadata)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Cached type hints: resolving annotations takes longer than the rest of a small mapping."""
    return get_type_hints(cls)


def _unknown_key(path: str, key: str, allowed: Sequence[str]) -> str:
    hint = did_you_mean(key, allowed)
    return f"There is no key '{shortened(path)}': {hint}The keys here are {', '.join(sorted(allowed))}."


def _convert(expected: Any, raw: Any, path: str, rules: Mapping[str, Any]) -> Any:
    """`raw` as a value of the type `expected`; `rules` are those of its field, which hold for all numbers in it."""
    origin, args = get_origin(expected), get_args(expected)
    if expected is Any:
        if rules.get("is_plain"):
            _check_plain(raw, path)
        return raw
    if origin is Literal:
        if raw is None and "none" in args:  # on a command line both are written none
            return "none"
        if raw in args and not isinstance(raw, bool):
            return raw
        hint = did_you_mean(raw, map(str, args), " ({})") if isinstance(raw, str) else ""
        raise JobError(f"{path} = {shown(raw)} is not possible{hint}; it is one of {', '.join(map(repr, args))}.")
    if origin in (Union, types.UnionType):
        return _convert_union(args, raw, path, rules)
    if origin is tuple:
        if isinstance(raw, str) or not isinstance(raw, Sequence):
            raise JobError(f"{path} = {shown(raw)} should be a list.")
        items = args[:1] * len(raw) if len(args) == 2 and args[1] is Ellipsis else args
        if len(items) != len(raw):
            raise JobError(f"{path} = {shown(raw)} should be a list of {len(items)}.")
        return tuple(
            _convert(kind, item, f"{path}[{i}]", rules) for i, (kind, item) in enumerate(zip(items, raw, strict=True))
        )
    if origin in (dict, Mapping):
        if not isinstance(raw, Mapping):
            raise JobError(f"{path} = {shown(raw)} should be a table.")
        return {str(key): _convert(args[1], item, f"{path}.{key}", rules) for key, item in raw.items()}
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        if isinstance(raw, expected):
            return raw
        if not isinstance(raw, Mapping):
            raise JobError(f"{path} = {shown(raw)} should be a table.")
        return from_mapping(expected, raw, path)
    return _convert_scalar(expected, raw, path, rules)


def _convert_union(args: tuple[Any, ...], raw: Any, path: str, rules: Mapping[str, Any]) -> Any:
    if raw is None and type(None) in args:
        return None
    kinds = [kind for kind in args if kind is not type(None)]
    for kind in kinds:
        try:
            return _convert(kind, raw, path, rules)
        except JobError:
            if len(kinds) == 1 or (isinstance(kind, type) and type(raw) is kind):  # of this kind, and out of bounds
                raise
    raise JobError(f"{path} = {shown(raw)} should be {' or '.join(_words_for(kind) for kind in kinds)}.")


def _words_for(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _TYPE_WORDS.get(kind, str(kind))


def _convert_scalar(expected: Any, raw: Any, path: str, rules: Mapping[str, Any]) -> Any:
    is_whole = isinstance(raw, int) and not isinstance(raw, bool)
    if not (isinstance(raw, expected) or (expected is float and is_whole)) or (
        isinstance(raw, bool) and expected is not bool
    ):
        raise JobError(f"{path} = {shown(raw)} should be {_TYPE_WORDS.get(expected, expected.__name__)}.")
    if isinstance(raw, str):
        _check_text(raw, path)
    if isinstance(raw, int) and not -_LARGEST <= raw < _LARGEST:
        raise JobError(f"{path} = {shown(raw)} is too large; it should be below 2^63.")
    value = float(raw) if expected is float else raw
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(rules, value, path)
    return value


def _check_text(text: str, path: str) -> None:
    """What neither a file nor a file's name can hold is refused here, before it is written to one."""
    if "\0" in text or (not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)):
        raise JobError(f"{path} = {shown(text)} should be text without null characters and lone surrogates.")


def _check_number(rules: Mapping[str, Any], value: float, path: str) -> None:
    """Every number is finite; the bounds of its field come on top."""
    if not math.isfinite(value):
        if rules.get("may_diverge"):
            return
        raise JobError(f"{path} = {value!r} should be a finite number.")
    if "above" in rules and not value > rules["above"]:
        raise JobError(f"{path} = {value!r} should be greater than {rules['above']}.")
    if "low" in rules and value < rules["low"]:
        raise JobError(f"{path} = {value!r} should be at least {rules['low']}.")
    if "high" in rules and value > rules["high"]:
        raise JobError(f"{path} = {value!r} should be at most {rules['high']}.")


def _check_plain(value: Any, path: str, depth: int = 1) -> None:
    """Options are written to job.json and handed to functions that expect what TOML has."""
    if depth > _DEEPEST:
        raise JobError(f"{shortened(path)} is nested too deeply; give {_DEEPEST} levels at most.")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_text(str(key), path)
            _check_plain(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _check_plain(item, f"{path}[{number}]", depth + 1)
    elif isinstance(value, bool | int | float | str):
        _convert_scalar(type(value), value, path, MAY_DIVERGE)
    elif value is not None:
        raise JobError(
            f"{path} = {shown(value)} should be a text, a number, true or false, or a list or table of these."
        )
