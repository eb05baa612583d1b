"""Parts of the sentences in messages and pages: counted nouns, durations, sizes, lists, quoted messages."""

from __future__ import annotations

import math
from collections.abc import Sequence


def number_of(count: int, noun: str) -> str:
    """ "1 worker", "2 workers", "1,024 workers"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Two or three significant digits in the fitting unit: "340 ms", "8.1 s", "3 min 20 s", "2 h 05 min"."""
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if seconds >= 119.5:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02d} s"
    if seconds >= 1:
        return f"{three_digits(seconds, 1)} s"
    if seconds >= 1e-3:
        return f"{three_digits(seconds * 1e3, 1)} ms"
    return f"{three_digits(seconds * 1e6, 1)} µs" if seconds > 0 else "0 s"


def size(num_bytes: float) -> str:
    """Three digits, in powers of 1024: "512 bytes", "64 MiB", "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def three_digits(number: float, most_decimals: int | None = None) -> str:
    """Three significant digits, without an exponent; fewer where that takes more decimals than `most_decimals`."""
    if number <= 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(number)))
    return f"{number:.{decimals if most_decimals is None else min(decimals, most_decimals)}f}"


def listing(items: Sequence[str]) -> str:
    """["1", "2", "4"] as "1, 2 and 4"."""
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def and_more(count: int) -> str:
    """ " and 3 more", behind a list that leaves out 3; nothing if none are left out."""
    return f" and {count:,} more" if count > 0 else ""


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
