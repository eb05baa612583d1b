"""Parts of the sentences in messages and pages: counted nouns, lists, quoted messages."""

from __future__ import annotations

from collections.abc import Sequence


def number_of(count: int, noun: str) -> str:
    """ "1 worker", "2 workers", "1,024 workers"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listing(items: Sequence[str]) -> str:
    """["1", "2", "4"] as "1, 2 and 4"."""
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def and_more(count: int) -> str:
    """ " and 3 more", behind a list that leaves out 3; nothing if none are left out."""
    return f" and {count:,} more" if count > 0 else ""


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def on_one_line(text: str) -> str:
    """`text` with a single space in place of every line end and run of spaces."""
    return " ".join(text.split())
