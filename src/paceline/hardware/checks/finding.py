"""What one check found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One sentence on what is so, and one on what to do."""

    level: Level
    """ "error": training will fail or be wrong; "warning": it will be slow or may fail."""
    check: str
    """A short name that scripts can rely on, such as "ulimit nofile"."""
    what: str
    fix: str = ""
    """A command where there is one; empty where nothing needs doing."""
    node: str = ""
    """The node it was found on; empty: this one, or all of them together."""


def ok(check: str, what: str) -> list[Finding]:
    return [Finding("ok", check, what)]


def warning(check: str, what: str, fix: str) -> list[Finding]:
    return [Finding("warning", check, what, fix)]


def error(check: str, what: str, fix: str) -> list[Finding]:
    return [Finding("error", check, what, fix)]


def size_text(num_bytes: float) -> str:
    """ "64 MiB", "1.5 GiB": in powers of 1024, to four digits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def words(items: list[str], most: int = 4) -> str:
    """ "a, b and c"; no more than `most` by name."""
    if len(items) > most:
        items = [*items[: most - 1], f"{len(items) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))
