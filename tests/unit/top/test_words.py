"""Numbers, sizes, durations and lists in sentences, and messages that may quote anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import errors, words
from paceline.errors import PacelineError, WorkerFailed
from paceline.report import formats

NOTHING = formats.NOTHING


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (words.number_of(0, "worker"), "0 workers"),
        (words.number_of(1, "worker"), "1 worker"),
        (words.number_of(1200, "worker"), "1,200 workers"),
        (words.listing([]), ""),
        (words.listing(["1"]), "1"),
        (words.listing(["1", "2", "4"]), "1, 2 and 4"),
        (words.and_more(0), ""),
        (words.and_more(3), " and 3 more"),
        (words.name_ranks([3]), "rank 3"),
        (words.name_ranks([1, 2]), "ranks 1, 2"),
        (words.size(0), "0 bytes"),
        (words.size(999), "999 bytes"),
        (words.size(1000), "0.977 KiB"),
        (words.size(2**20), "1 MiB"),
        (words.size(1.5 * 2**30), "1.5 GiB"),
        (words.size(2**40), "1.0 TiB"),
        (formats.duration(0.0), "0 s"),
        (formats.duration(14.1e-6), "14.1 µs"),
        (formats.duration(0.34), "340 ms"),
        (formats.duration(8.07), "8.1 s"),
        (formats.duration(112.4), "112 s"),
        (formats.duration(200.4), "3 min 20 s"),
        (formats.duration(3599.7), "60 min 00 s"),
        (formats.duration(7500.0), "2 h 05 min"),
        (formats.duration(None), NOTHING),
        (formats.points(-0.0125), "\N{MINUS SIGN}1.25"),
        (formats.points(0.005), "+0.50"),
        (formats.points(-0.00001), "+0.00"),
        (formats.points(None), NOTHING),
        (formats.percent(0.978), "97.8 %"),
        (formats.percent(0.97777, 2), "97.78 %"),
        (formats.percent(None), NOTHING),
        (formats.short_percent(0.5), "50 %"),
        (formats.short_percent(0.0025), "0.25 %"),
        (formats.short_points(0.01), "1 point"),
        (formats.short_points(0.0025), "0.25 points"),
        (formats.spread(0.9754, 0.9798), "97.54\N{EN DASH}97.98"),
        (formats.times(1.7861), "1.79x"),
        (formats.times(None), NOTHING),
        (formats.quantity(12345.6), "12,346"),
        (formats.quantity(9.87), "9.9"),
        (formats.quantity(0), "0"),
        (formats.devices(1), "1 device"),
    ],
)
def test_numbers_as_people_read_them(found: str, text: str) -> None:
    assert found == text


def parsed_s(text: str) -> float:
    """The seconds that a duration says."""
    units = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+) (h|min|ms|µs|s)", text))


@given(st.floats(1e-5, 1e6))
def test_a_duration_is_short_and_right_to_two_digits(seconds: float) -> None:
    text = words.duration(seconds)
    assert len(text) <= 12
    assert parsed_s(text) == pytest.approx(seconds, rel=0.051)


@given(st.floats(1, 1e13))
def test_a_size_is_right_to_three_digits(num_bytes: float) -> None:
    number, unit = words.size(num_bytes).replace(",", "").split(" ")
    power = ("bytes", "KiB", "MiB", "GiB", "TiB").index(unit)
    assert float(number) * 1024**power == pytest.approx(num_bytes, rel=0.06 if unit == "TiB" else 0.006)


@given(st.text(max_size=4000))
def test_a_message_shows_no_control_characters_and_stays_short(text: str) -> None:
    message = str(PacelineError(text))
    assert len(message) <= 1500
    assert all(one.isprintable() or one in "\n\t" for one in message)
    if text.isprintable() and len(text) <= 1500:
        assert message == text


@given(
    st.recursive(st.none() | st.integers() | st.text(max_size=300) | st.binary(max_size=300), st.lists, max_leaves=40)
)
def test_any_value_is_shown_shortly(value: object) -> None:
    assert 0 < len(errors.shown(value)) <= 202


@pytest.mark.parametrize("value", ["x" * 10**6, [[]] * 10**5, object()], ids=type)
def test_a_huge_value_is_shown_shortly(value: object) -> None:
    assert 0 < len(errors.shown(value)) <= 202


@given(st.text(max_size=300), st.integers(3, 120))
def test_a_shortened_text_has_both_ends(text: str, most: int) -> None:
    short = errors.shortened(text, most)
    assert len(short) <= most
    assert short == text if len(text) <= most else text.startswith(short.partition("…")[0])


@pytest.mark.parametrize(
    ("word", "nearest"), [("rong", "ring"), ("all-reduce", "all_reduce"), ("", None), ("quite other", None)]
)
def test_the_nearest_word_is_proposed_where_one_is_near(word: str, nearest: str | None) -> None:
    found = errors.did_you_mean(word, ["ring", "all_reduce", "tree_exact"])
    assert (f"'{nearest}'" in found) if nearest else found == ""


def test_a_failed_worker_keeps_its_traceback_as_a_note() -> None:
    problem = WorkerFailed("rank 1 ended", rank=1, details="Traceback: x\n", exit_code=3)
    assert (problem.rank, problem.exit_code, problem.__notes__) == (1, 3, ["Traceback: x"])


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("PacelineError", 2),
        ("JobError", 2),
        ("ClusterError", 2),
        ("DataError", 2),
        ("ModelError", 2),
        ("CheckpointError", 2),
        ("LaunchError", 2),
        ("DivergenceError", 1),
        ("WorkerFailed", 1),
    ],
)
def test_a_users_mistake_ends_with_two_and_a_failed_run_with_one(name: str, exit_code: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, PacelineError) and kind("x").exit_code == exit_code


def test_a_problem_of_a_file_has_the_systems_reason_and_no_number() -> None:
    with pytest.raises(PacelineError) as caught, errors.file_problems("x cannot be read", remedy="name another"):
        Path("/nowhere/at/all").read_bytes()
    assert "No such file" in str(caught.value) and "name another" in str(caught.value)
    assert "Errno" not in str(caught.value)


def test_a_file_in_another_encoding_is_told_without_the_words_of_a_codec() -> None:
    with pytest.raises(PacelineError) as caught, errors.file_problems("rows.csv cannot be read"):
        "Gerät".encode("utf-16").decode("utf-8")
    assert str(caught.value) == "rows.csv cannot be read: it is no text in UTF-8."
