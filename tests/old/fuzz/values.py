"""Values for the place of others: some that nobody can mean, and some that are merely strange."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]

DEEP: Any = 1
for _ in range(200):
    DEEP = [DEEP]

NO_NUMBERS: tuple[Any, ...] = (
    math.nan,
    math.inf,
    -math.inf,
    2**70,
    -(2**70),
    10**400,
    -1,
    "7",
    "٣",
    "",
    [],
    {},
    [[1]],
    True,
    False,
    DEEP,
)
"""In the place of any number."""
NO_TEXTS: tuple[Any, ...] = (7, 1.5, [], {}, False, "half of a character \ud800", "a zero \0", DEEP)
LONG_TEXTS = ("x" * 300, "ä" * 5_000, "../" * 50, "\x1b[2J\x1b]0;title\x07", "a\nb", "", " ", "NaN", "null")

strange = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(LONG_TEXTS),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=8), inside, max_size=3),
    max_leaves=6,
)


@dataclass(frozen=True)
class Case:
    """An input, and why it has to be refused; empty: it may be accepted."""

    content: Any
    impossible: str = ""


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every number, text and so on in nested tables and lists, with the way to it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from leaves(item, (*path, number))
    else:
        yield path, value


def put(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value at the end of a path."""
    changed = copy.deepcopy(value)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return changed


def cases(valid: Mapping[str, Any], free: tuple[str, ...] = ()) -> st.SearchStrategy[Case]:
    """The valid table with something else in one or more places.

    Args:
        free: keys below which everything is allowed that is of the right type.
    """
    found = list(leaves(valid))
    numbers = [path for path, leaf in found if isinstance(leaf, int | float) and not isinstance(leaf, bool)]
    texts = [path for path, leaf in found if isinstance(leaf, str)]
    numbers, texts = ([path for path in paths if not set(path) & set(free)] for paths in (numbers, texts))

    def impossible(path: Path, new: Any) -> Case:
        return Case(put(valid, path, new), f"{'.'.join(map(str, path))} = {repr(new)[:60]}")

    wrong = st.one_of(
        st.builds(impossible, st.sampled_from(numbers), st.sampled_from(NO_NUMBERS)) if numbers else st.nothing(),
        st.builds(impossible, st.sampled_from(texts), st.sampled_from(NO_TEXTS)) if texts else st.nothing(),
        st.builds(
            lambda key: Case({**valid, key: 1}, f"the key {key}"),
            st.text(max_size=9).filter(lambda key: key not in valid),
        ),
    )
    odd = st.builds(
        lambda path, new: Case(put(valid, path, new)),
        st.sampled_from([path for path, _ in found]),
        strange | st.integers(-3, 3) | st.sampled_from([1e308, -1e308, 5e-324, 2**62, 2**31]),
    )
    less = st.builds(
        lambda key: Case({name: item for name, item in valid.items() if name != key}), st.sampled_from(list(valid))
    )
    return wrong | odd | less


def json_text(value: Any) -> str:
    return json.dumps(value)


def spoiled(text: bytes) -> st.SearchStrategy[bytes]:
    """The bytes of a file with some lost, changed, repeated or put in; or of something else altogether."""
    places = st.integers(0, max(0, len(text) - 1))
    inserted = st.binary(max_size=12) | st.sampled_from(
        [
            b"1" * 5_000,
            b"[" * 10_000,
            b'{"a":' * 10_000,
            b"\xff\xfe",
            b"\x00",
            "\N{ARABIC-INDIC DIGIT THREE}".encode(),
            b"1e999",
            b"NaN",
        ]
    )
    return st.one_of(
        st.builds(lambda at, new: text[:at] + new + text[at:], places, inserted),
        st.builds(lambda at, new: text[:at] + new + text[at + len(new) :], places, inserted),
        st.builds(lambda at: text[:at], places),
        st.builds(lambda one, two: text[min(one, two) : max(one, two)], places, places),
        st.binary(max_size=60),
        inserted,
    )
