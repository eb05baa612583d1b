"""Which nodes to use, and how many workers each may have: a command-line value or a file.

    paceline launch --hosts "gpu1:8,gpu2:8"

    # hosts.txt: one node per line
    gpu1 slots=8
    kim@gpu2:4
    [fd00::3]

Ports, keys and jump hosts are written to ~/.ssh/config, where every other use of ssh finds them too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError, file_problems, shown
from paceline.regular_files import read_text

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_MOST_CHARACTERS = 300
"""The longest entry that is read: names of nodes have up to 253."""
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")


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
    entries = [(f"hosts, entry {number}", entry.strip()) for number, entry in enumerate(text.split(","), 1)]
    return _distinct((where, _parse_entry(entry, where)) for where, entry in entries)


def read_node_file(path: Path) -> tuple[NodeSlots, ...]:
    """Read the nodes of a file, in their order: `name`, `name:8` or `name slots=8` per line; # begins a comment.

    Raises:
        LaunchError: the file cannot be read or names no node, a line is invalid, or a node is named twice.
    """
    with file_problems(f"The hosts file {path} cannot be read", LaunchError):
        lines = read_text(path).removeprefix("\ufeff").splitlines()
    entries = [(f"{path}, line {number}", line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    if not any(entry for _, entry in entries):
        raise LaunchError(f"The hosts file {path} names no node; write one per line, such as gpu1 slots=8.")
    return _distinct((where, _parse_entry(entry, where)) for where, entry in entries if entry)


def _parse_entry(entry: str, where: str) -> NodeSlots:
    if len(entry) > _MOST_CHARACTERS:
        raise LaunchError(f"{where}: {shown(entry)} is not the name of a node; it should look like gpu1 or kim@gpu1:8.")
    host, *settings = entry.split() or [""]
    counted = re.fullmatch(r"(.*\]|[^:]*):([^:\]]*)", host)  # a colon within an IPv6 address begins no count
    host, count = counted.groups() if counted else (host, None)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "port" or key.startswith("-p"):
            raise LaunchError(f"{where}: {setting!r} has no place here; write the port of {host} to ~/.ssh/config.")
        if key != "slots" or count is not None:
            raise LaunchError(f"{where}: {setting!r} should be slots=N, once, after the node's name.")
        count = value
    if count is not None and not _NUMBER.fullmatch(count):
        raise LaunchError(f"{where}: {count!r} should be the number of workers on {host}, 1 or more.")
    return NodeSlots(_checked(host, where), None if count is None else int(count))


def _checked(host: str, where: str) -> str:
    """`host` as `ssh` takes it."""
    user, at, name = host.rpartition("@")
    if at and not _NAME.fullmatch(user):
        raise LaunchError(f"{where}: {host!r} should have a user's name before the @.")
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
        if not _is_ipv6(name):
            raise LaunchError(f"{where}: [{name}] should be an IPv6 address, such as [fd00::3].")
    elif _is_ipv6(name):
        raise LaunchError(f"{where}: write the IPv6 address in brackets, as in [{name}] or [{name}]:8.")
    elif not _NAME.fullmatch(name):
        raise LaunchError(
            f"{where}: {host!r} is not the name of a node; it should look like gpu1, kim@gpu1 or 10.0.0.7."
        )
    return user + at + name


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return re.fullmatch(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?", text) is not None


def _distinct(nodes: Iterable[tuple[str, NodeSlots]]) -> tuple[NodeSlots, ...]:
    found: dict[str, tuple[str, NodeSlots]] = {}
    for where, node in nodes:
        before, _ = found.setdefault(node.address.rpartition("@")[2].lower(), (where, node))
        if before != where:
            raise LaunchError(
                f"{where}: {node.address} was named before ({before}); name every node once, with all its workers."
            )
    return tuple(node for _, node in found.values())
