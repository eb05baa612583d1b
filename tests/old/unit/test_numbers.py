"""No key of a job and no option of a command takes a number that cannot be meant; `make fuzz` has more of them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from paceline.errors import JobError, PacelineError
from paceline.spec import Job
from tests.old.fuzz import options
from tests.old.fuzz.engine import in_scratch_folder
from tests.old.fuzz.values import NO_NUMBERS, Case

NO_TEXTS = ("nan", "inf", "-inf", "-1", "٣", "³", "9" * 5_000, "true", "1_", "0x", "")


def _numbers(kind: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dataclasses.Field[Any], bool]]:
    """All keys of a job that are numbers: the way there, the field, and whether it is a list of them."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _numbers(hints[field.name], (*path, field.name))
        elif {int, float} & {hints[field.name], *get_args(hints[field.name])}:
            yield (*path, field.name), field, isinstance(field.default, tuple)


KEYS = {".".join(path): (field, is_list) for path, field, is_list in _numbers(Job)}


def _is_refused(path: str, value: Any) -> bool:
    for key in reversed(path.split(".")):
        value = {key: value}
    try:
        Job.from_mapping(value)
    except JobError as refusal:
        assert len(str(refusal)) < 600
        return True
    return False


@pytest.mark.parametrize("path", KEYS)
def test_a_key(path: str) -> None:
    field, is_list = KEYS[path]
    lists = [[value, value] for value in NO_NUMBERS]
    accepted = [repr(value)[:30] for value in (lists if is_list else NO_NUMBERS) if not _is_refused(path, value)]
    may_be_zero = is_list or ("above" not in field.metadata and field.metadata.get("low", 0) <= 0)
    if not may_be_zero and not _is_refused(path, 0):
        accepted.append("0")
    for text in () if is_list else NO_TEXTS:
        with pytest.raises(JobError):
            Job().with_settings([f"{path}={text}"])
    assert accepted == []


@pytest.mark.parametrize("name", options.CALLS)
def test_the_options_of_a_command(name: str) -> None:
    command = options.commands()[name]
    pairs = [(one.opts[0], text) for one in options.counts(command) for text in ("0", "2147483648", "٣")]
    pairs += [(one.opts[0], text) for one in options.amounts(command) for text in ("-1", "inf", "٣")]
    with in_scratch_folder():
        accepted = [pair for pair in pairs if not _is_refused_by_command(options.call(name, *pair))]
    assert accepted == []


@pytest.mark.parametrize(
    ("command", "option", "texts"),
    [
        ("plan", "--devices", ("0", "٣", "1" * 30, "1..٣", "nan")),
        ("verify", "--workers", ("0", "٣", "1" * 30, "-1")),
        ("scale", "--tolerance", ("nan", "inf%", "-1", "101%", "٣%", "")),
        ("bench comm", "--min-bytes", ("0", "0K", "٣K", "-1", "1e3", "9" * 16)),
        ("submit kubernetes", "--memory", ("0", "٣G", "nan")),
        ("submit slurm", "--time", ("٣:00", "0:00", "1:60", "-1:00", "nan")),
        ("train", "--hosts", ("a:٣", "a:0", "a:-1", "a:9999999", "a:nan")),
        ("train", "--strategy", ("dp٣", "dp0", "dp-1", "dp99999999999", "dpnan")),
    ],
)
def test_numbers_in_texts(command: str, option: str, texts: tuple[str, ...]) -> None:
    with in_scratch_folder():
        assert [text for text in texts if not _is_refused_by_command(options.call(command, option, text))] == []


def _is_refused_by_command(words: tuple[str, ...]) -> bool:
    with contextlib.redirect_stderr(io.StringIO()):  # from which `take` reads
        try:
            options.take(Case(words))
        except PacelineError:
            return True
    return False
