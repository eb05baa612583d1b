"""Frozen dataclasses to plain mappings and back, checked on the way in.

A mapping from a user is checked against the dataclass: unknown keys, wrong types and values outside the declared
choices or bounds are a `JobError` whose sentence names the key, the value, and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.errors import JobError

T = TypeVar("T")

_TYPE_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    type(None): "nothing",
}


def at_least(low: float, default: Any) -> Any:
    """A dataclass field whose number may not be below `low`."""
    return dataclasses.field(default=default, metadata={"low": low})


def between(low: float, high: float, default: Any) -> Any:
    """A dataclass field whose number lies in [low, high]."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def above(low: float, default: Any) -> Any:
    """A dataclass field whose number is greater than `low`."""
    return dataclasses.field(default=default, metadata={"above": low})


class JsonValue:
    """A frozen dataclass that is also a JSON file."""

    json_indent: ClassVar[int] = 2

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """The value of plain dictionaries and lists. Raises `JobError` for unknown keys and invalid values."""
        return from_mapping(cls, mapping)

    def to_mapping(self) -> dict[str, Any]:
        return to_mapping(self)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_mapping(), indent=self.json_indent) + "\n", encoding="utf-8")


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


def from_mapping(cls: type[T], mapping: Mapping[str, Any], where: str = "") -> T:
    """Build the dataclass `cls` from `mapping`; `where` is the dotted path used in error sentences."""
    hints = _hints(cls)  # type: ignore[arg-type]
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, raw in mapping.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in fields:
            raise JobError(_unknown_key(path, str(key), list(fields)))
        values[key] = _convert(hints[key], raw, path)
        _check_bounds(fields[key].metadata, values[key], path)
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        path = f"{where}.{missing[0]}" if where else missing[0]
        raise JobError(f"The key '{path}' is missing; give it a value.")
    return cls(**values)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Cached type hints: resolving annotations takes longer than the rest of a small mapping."""
    return get_type_hints(cls)


def _unknown_key(path: str, key: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"There is no key '{path}': {hint}The keys here are {', '.join(sorted(allowed))}."


def _convert(expected: Any, raw: Any, path: str) -> Any:
    origin, args = get_origin(expected), get_args(expected)
    if expected is Any:
        return raw
    if origin is Literal:
        if raw is None and "none" in args:  # on a command line both are written none
            return "none"
        if raw in args and not isinstance(raw, bool):
            return raw
        near = difflib.get_close_matches(str(raw), [str(a) for a in args], n=1, cutoff=0.5)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise JobError(f"{path} = {raw!r} is not possible{hint}; it is one of {', '.join(map(repr, args))}.")
    if origin in (Union, types.UnionType):
        return _convert_union(args, raw, path)
    if origin is tuple:
        if isinstance(raw, str) or not isinstance(raw, Sequence):
            raise JobError(f"{path} = {raw!r} should be a list.")
        items = args[:1] * len(raw) if len(args) == 2 and args[1] is Ellipsis else args
        if len(items) != len(raw):
            raise JobError(f"{path} = {raw!r} should be a list of {len(items)}.")
        return tuple(
            _convert(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(items, raw, strict=True))
        )
    if origin in (dict, Mapping):
        if not isinstance(raw, Mapping):
            raise JobError(f"{path} = {raw!r} should be a table.")
        return {str(key): _convert(args[1], item, f"{path}.{key}") for key, item in raw.items()}
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        if isinstance(raw, expected):
            return raw
        if not isinstance(raw, Mapping):
            raise JobError(f"{path} = {raw!r} should be a table.")
        return from_mapping(expected, raw, path)
    return _convert_scalar(expected, raw, path)


def _convert_union(args: tuple[Any, ...], raw: Any, path: str) -> Any:
    if raw is None and type(None) in args:
        return None
    kinds = [kind for kind in args if kind is not type(None)]
    for kind in kinds:
        try:
            return _convert(kind, raw, path)
        except JobError:
            if len(kinds) == 1:
                raise
    raise JobError(f"{path} = {raw!r} should be {' or '.join(_words_for(kind) for kind in kinds)}.")


def _words_for(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _TYPE_WORDS.get(kind, str(kind))


def _convert_scalar(expected: Any, raw: Any, path: str) -> Any:
    if expected is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(raw, expected) and (expected is bool or not isinstance(raw, bool)):
        return raw
    raise JobError(f"{path} = {raw!r} should be {_TYPE_WORDS.get(expected, expected.__name__)}.")


def _check_bounds(bounds: Mapping[str, Any], value: Any, path: str) -> None:
    if not bounds or value is None or isinstance(value, bool | str):
        return
    if not math.isfinite(value):
        raise JobError(f"{path} = {value!r} should be a finite number.")
    if "above" in bounds and not value > bounds["above"]:
        raise JobError(f"{path} = {value!r} should be greater than {bounds['above']}.")
    if "low" in bounds and value < bounds["low"]:
        raise JobError(f"{path} = {value!r} should be at least {bounds['low']}.")
    if "high" in bounds and value > bounds["high"]:
        raise JobError(f"{path} = {value!r} should be at most {bounds['high']}.")
