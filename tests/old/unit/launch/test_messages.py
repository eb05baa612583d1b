"""Lines between the launcher and its agents."""

from __future__ import annotations

import dataclasses
import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import LaunchError
from paceline.launch import messages
from paceline.launch.messages import AgentMessage, Ping, Refused, decode

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
mappings = st.dictionaries(st.text(), plain, max_size=3)


def any_message(kind: type[AgentMessage]) -> st.SearchStrategy[AgentMessage]:
    """With whatever its fields' types allow."""
    by_type = {
        float: st.floats(allow_nan=False),
        dict[str, typing.Any]: mappings,
        list[dict[str, typing.Any]]: st.lists(mappings, max_size=3),
    }
    hints = typing.get_type_hints(kind)
    wanted = [hints[field.name] for field in dataclasses.fields(kind)]
    values = [by_type[expected] if expected in by_type else st.from_type(expected) for expected in wanted]
    return st.builds(kind, *values)


def test_every_kind_of_message_is_known() -> None:
    written = {
        name
        for name, value in vars(messages).items()
        if isinstance(value, type) and issubclass(value, AgentMessage) and value is not AgentMessage
    }
    assert set(AgentMessage.kinds) == written
    assert len(written) >= 16


@pytest.mark.parametrize("kind", AgentMessage.kinds.values(), ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_message_is_one_line_and_reads_back_as_written(kind: type[AgentMessage], data: st.DataObject) -> None:
    message = data.draw(any_message(kind))
    line = message.encode()
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode(line) == message
    assert type(decode(line)) is kind


def assert_refused_or_meant(line: bytes) -> None:
    try:
        assert isinstance(decode(line), AgentMessage)
    except LaunchError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2000


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_sentence(line: bytes) -> None:
    assert_refused_or_meant(line)


@given(plain)
def test_any_json_is_a_message_or_a_sentence(value: object) -> None:
    assert_refused_or_meant(json.dumps(value).encode())


@given(st.sampled_from(sorted(AgentMessage.kinds)), st.dictionaries(st.text(max_size=8), plain, max_size=4))
def test_other_fields_are_no_message(kind: str, fields: dict[str, object]) -> None:
    wanted = {field.name for field in dataclasses.fields(AgentMessage.kinds[kind])}
    line = json.dumps(fields | {"is": kind}).encode()
    if set(fields) - {"is"} == wanted:
        return
    with pytest.raises(LaunchError):
        decode(line)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"Welcome to gpu1\n",
        b"null",
        b"[]",
        b"{}",
        b'["is"]',
        b'{"is": "AgentMessage"}',
        b'{"is": ["Ping"]}',
        b'{"is": "Ping", "self": 1}',
        b'{"is": "Refused"}',
        b"\xff\xfe\x00",
        b'{"is": "Ping"} {"is": "Ping"}',
        b"9" * 5000,
    ],
)
def test_what_else_a_shell_may_print_is_refused(line: bytes) -> None:
    with pytest.raises(LaunchError, match="Expected a message of a Paceline agent"):
        decode(line)


def test_nesting_without_end_is_refused_too() -> None:
    with pytest.raises(LaunchError):
        decode(b"[" * 100_000)


def test_the_sentence_shows_what_was_printed_but_not_a_flood_of_it() -> None:
    with pytest.raises(LaunchError, match="Last login: Monday"):
        decode(b"Last login: Monday\n")
    with pytest.raises(LaunchError) as caught:
        decode(b"x" * 100_000)
    assert len(str(caught.value)) < 500


def test_text_of_any_kind_stays_on_its_line() -> None:
    assert decode(Refused("one\ntwo\r\u2028\0").encode()) == Refused("one\ntwo\r\u2028\0")
    assert Ping().encode() == b'{"is": "Ping"}\n'
