"""Which nodes to use, and how many workers each may have: a command-line value or a file.

    paceline launch --hosts "gpu1:8,gpu2:8"

    # hosts.txt: one node per line
    gpu1 slots=8
    kim@gpu2:4
    [fd00::3]

Ports, keys and jump hosts are written to ~/.ssh/config, where every other use of ssh finds them too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError, file_problems, shown

_ENTRY = re.compile(
    r"(?P<user>\w[\w.-]*@)?(?:(?P<name>\w[\w.-]*)|\[(?P<ipv6>[0-9a-f.]*:[0-9a-f:.]+(?:%[\w.-]+)?)\])"
    r"(?:(?::|\s+slots=)(?P<count>[1-9][0-9]{0,5}))?",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True)
class NodeSlots:
    """A node as its launcher reaches it, and how many workers may run there."""

    address: str
    """A name or an address as `ssh` takes it: after its user, if one was given; IPv6 without brackets."""
    num_workers: int | None = None
    """The number of workers; None: as many as the node has devices."""


def parse_node_list(text: str) -> tuple[NodeSlots, ...]:
    """Parse nodes such as "a:8,kim@b:4,[fd00::3]", in their order.

    Raises:
        LaunchError: an invalid entry, a node named twice, or no node.
    """
    return _parse({f"hosts, entry {number}": entry for number, entry in enumerate(text.split(","), 1)})


def read_node_file(path: Path) -> tuple[NodeSlots, ...]:
    """Read the nodes of a file, in their order: `name`, `name:8` or `name slots=8` per line; # begins a comment.

    Raises:
        LaunchError: the file cannot be read or names no node, a line is invalid, or a node is named twice.
    """
    with file_problems(f"The hosts file {path} cannot be read", LaunchError):
        lines = path.read_text("utf-8-sig").splitlines()
    entries = {f"{path}, line {number}": line.partition("#")[0] for number, line in enumerate(lines, 1)}
    named = {where: entry for where, entry in entries.items() if entry.strip()}
    if not named:
        raise LaunchError(f"The hosts file {path} names no node; write one per line, such as gpu1 slots=8.")
    return _parse(named)


def _parse(entries: dict[str, str]) -> tuple[NodeSlots, ...]:
    """The nodes of entries, by the place where each stands."""
    nodes: dict[str, NodeSlots] = {}
    for where, entry in entries.items():
        found = _ENTRY.fullmatch(entry.strip())
        if found is None:
            raise LaunchError(
                f"{where}: {shown(entry.strip())} should be a node such as gpu1, kim@gpu1:8, gpu1 slots=8 or "
                "[fd00::3]:8, with the number of its workers; ports and keys are for ~/.ssh/config."
            )
        name = found["name"] or found["ipv6"]
        if name.lower() in nodes:
            raise LaunchError(f"{where}: {name} was named before; name every node once, with all its workers.")
        count = int(found["count"]) if found["count"] else None
        nodes[name.lower()] = NodeSlots((found["user"] or "") + name, count)
    return tuple(nodes.values())
