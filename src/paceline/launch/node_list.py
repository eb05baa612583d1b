"""Which nodes to use, and how many workers each may have, as on a command line: "gpu1:8,kim@gpu2:4,[fd00::3]".

Ports, keys and jump hosts are written to ~/.ssh/config, where every other use of ssh finds them too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import LaunchError, shown

_ENTRY = re.compile(
    r"(?P<user>\w[\w.-]*@)?(?:(?P<name>\w[\w.-]*)|\[(?P<ipv6>[0-9a-f.]*:[0-9a-f:.]+(?:%[\w.-]+)?)\])"
    r"(?::(?P<count>[1-9][0-9]{0,5}))?",
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
    nodes: dict[str, NodeSlots] = {}
    for number, entry in enumerate(text.split(","), 1):
        found = _ENTRY.fullmatch(entry.strip())
        if found is None:
            raise LaunchError(
                f"hosts, entry {number}: {shown(entry.strip())} should be a node such as gpu1, kim@gpu1:8 or "
                "[fd00::3]:8, with the number of its workers; ports and keys are for ~/.ssh/config."
            )
        name = found["name"] or found["ipv6"]
        if name.lower() in nodes:
            raise LaunchError(
                f"hosts, entry {number}: {name} was named before; name every node once, with all its workers."
            )
        count = int(found["count"]) if found["count"] else None
        nodes[name.lower()] = NodeSlots((found["user"] or "") + name, count)
    return tuple(nodes.values())
