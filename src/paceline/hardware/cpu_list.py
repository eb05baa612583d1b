"""Lists of cores and NUMA nodes as the kernel writes them: "0-23,96-119"."""

from __future__ import annotations

import re

MOST = 65536
"""No kernel numbers more cores (NR_CPUS is 8192 at most); a longer list is a typing error."""

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def parse_cpus(text: str) -> tuple[int, ...]:
    """The numbers of "0-3,8" in ascending order, each once.

    Raises:
        ValueError: the text is no such list; its message is a sentence without a full stop.
    """
    numbers: set[int] = set()
    for item in text.strip().split(","):
        found = _RANGE.fullmatch(item.strip())
        if not found:
            raise ValueError(f"{text[:40]!r} is not a list of numbers such as 0-23,96-119")
        low, high = int(found[1]), int(found[2] or found[1])
        if low > high or high >= MOST:
            raise ValueError(f"{item.strip()!r} is not a range of numbers below {MOST}")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))
