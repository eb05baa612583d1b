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


def parse_mask(text: str) -> tuple[int, ...]:
    """The cores of a mask such as "0000ffff,00000000": groups of 32 bits in hexadecimal, the highest first.

    Raises:
        ValueError: as for `parse_cpus`.
    """
    groups = text.split(",")
    if not all(re.fullmatch(r"[0-9a-fA-F]{1,8}", group) for group in groups) or len(groups) > MOST // 32:
        raise ValueError(f"{text[:40]!r} is not a mask of cores such as 0000ffff,00000000")
    mask = int("".join(group.zfill(8) for group in groups), 16)
    return tuple(core for core in range(mask.bit_length()) if mask >> core & 1)
