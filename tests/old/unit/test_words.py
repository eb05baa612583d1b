"""Counted nouns, lists and quoted messages in sentences."""

from __future__ import annotations

import pytest

from paceline.words import and_more, listing, name_ranks, number_of, on_one_line, size


@pytest.mark.parametrize(("count", "words"), [(0, "0 workers"), (1, "1 worker"), (1200, "1,200 workers")])
def test_one_worker_is_one_worker(count: int, words: str) -> None:
    assert number_of(count, "worker") == words


def test_lists_are_words_of_a_sentence() -> None:
    assert listing([]) == ""
    assert listing(["1"]) == "1"
    assert listing(["1", "2", "4"]) == "1, 2 and 4"
    assert (and_more(0), and_more(3)) == ("", " and 3 more")
    assert (name_ranks([3]), name_ranks([1, 2])) == ("rank 3", "ranks 1, 2")


def test_sizes_have_three_digits() -> None:
    numbers = [0, 999, 1000, 2**20, 1.5 * 2**30, 2**40]
    assert [size(n) for n in numbers] == ["0 bytes", "999 bytes", "0.977 KiB", "1 MiB", "1.5 GiB", "1.0 TiB"]


def test_a_quoted_message_is_one_line() -> None:
    assert on_one_line("size mismatch:\n\tfc.weight  is\n") == "size mismatch: fc.weight is"
