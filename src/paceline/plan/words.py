"""Times and sizes as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """ "36.9 ms" or "1.20 s"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def size(num_bytes: float) -> str:
    for name, unit in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= unit / 2:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes / 1024:.3g} KiB"
