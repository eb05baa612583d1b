"""A node's wires and the devices chosen on it: a table for the terminal, sentences, and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from operator import itemgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.report.formats import NOTHING, duration, times
from paceline.report.tables import MARK, Grid, grid_of, table
from paceline.spec import Link, Node
from paceline.spec.cluster import DeviceChoice, DeviceRing, num_nvlinks
from paceline.words import listing, number_of, size

_LABELS = {
    "PIX": ("PCIe", "through one PCIe bridge"),
    "PXB": ("PCIe", "through several PCIe bridges without crossing a host bridge"),
    "PHB": ("host", "through a PCIe host bridge, which is part of the CPU"),
    "NODE": ("host", "between PCIe host bridges of one NUMA node"),
    "SYS": ("sockets", "across the link between the sockets"),
}
"""Kind of wire, and what `nvidia-smi topo -m` prints in its own words as a legend."""

_STYLES = {"NVLink": "bold green", "PCIe": "cyan", "host": "yellow", "sockets": "red", "other": ""}


def label_words(label: str) -> str:
    """What a link with this label goes through, to follow on "they talk"."""
    if bonds := num_nvlinks(label):
        return "over one NVLink" if bonds == 1 else f"over {bonds} NVLinks"
    return _LABELS.get(label, ("", "in a way that has no name here"))[1]


def label_class(label: str) -> str:
    """The kind of wire: NVLink, PCIe, host (through the CPU), sockets, other."""
    return "NVLink" if num_nvlinks(label) else _LABELS.get(label, ("other", ""))[0]


def bandwidth_text(bytes_per_s: float | None) -> str:
    """ "12 GB/s", "56.2 GB/s", "450 GB/s"."""
    if bytes_per_s is None:
        return NOTHING
    gigabytes = bytes_per_s / 1e9
    return f"{gigabytes:.0f} GB/s" if gigabytes >= 100 else f"{gigabytes:.3g} GB/s"


def link_text(link: Link | None) -> str:
    """ "NV2, 50 GB/s"."""
    if link is None:
        return "unknown"
    return link.label if link.bytes_per_s is None else f"{link.label}, {bandwidth_text(link.bytes_per_s)}"


def rate_words(links: Iterable[Link]) -> str:
    """What links carry in one direction, the range if they differ; may be empty."""
    known = sorted(link.bytes_per_s for link in links if link.bytes_per_s is not None)
    words = " to ".join(dict.fromkeys(map(bandwidth_text, known[:1] + known[-1:])))
    return f"about {words}" if words else ""


def pair_sentence(node: Node, one: str, other: str) -> str:
    """How two parts of a node, by their labels, reach each other and how fast.

    "GPU0 and GPU1 talk through several PCIe bridges without crossing a host bridge (PXB), about 12 GB/s."
    """
    link = node.link(one, other)
    if link is None:
        return f"Nothing is known of the link between {one} and {other}."
    rate = rate_words([link]) or "at a bandwidth nobody knows"
    return f"{one} and {other} talk {label_words(link.label)} ({link.label}), {rate}."


def legend(node: Node) -> list[tuple[str, str]]:
    """Each label of the node with what it goes through and carries, the fastest first."""
    by_label: dict[str, list[Link]] = {}
    for link in sorted(node.links, key=lambda link: -(link.bytes_per_s or 0.0)):
        by_label.setdefault(link.label, []).append(link)
    return [(label, f"{label_words(label)}, {rate_words(links)}".strip(", ")) for label, links in by_label.items()]


# --- The table ---


def node_view(node: Node, width: int, ring: Sequence[int] = ()) -> RenderableType:
    """Everything there is on a node: title, parts, matrix with its legend, notes.

    Args:
        width: Columns of text that fit; a wider matrix goes on below.
        ring: Indices of devices in the order of a ring to mark.
    """
    parts: list[RenderableType] = [Text(title(node), style="bold")]
    if node.device_kind == "cpu":
        memory = f", {size(node.memory_bytes)} of memory" if node.memory_bytes else ""
        parts.append(Text(f"{node.num_cores} cores{memory}, {node.cpu_name}"))
    known = _parts_table(node)
    if len(known.headings) > 1:
        parts += [Text(), known]
    if node.device_kind != "cpu" and node.links:
        parts += [*_matrices(node, width, ring), Text()]
        for label, words in legend(node):
            parts.append(Text.assemble((f"{label:6}", _STYLES[label_class(label)]), words))
    if len(ring) > 1:
        parts.append(Text(f"{MARK} a link of the ring"))
    if node.notes:
        parts += [Text(), *map(Text, node.notes)]
    if node.device_kind == "cpu":
        parts.append(Text("No GPU was found: training runs on CPU workers, and there are no links to draw."))
    return Group(*parts)


def title(node: Node) -> str:
    """ "gpu-7: 8 x NVIDIA H100 80GB HBM3, 8 NICs, 2 NUMA nodes"."""
    kinds = Counter(device.name or ("GPU" if device.kind == "cuda" else "CPU core") for device in node.devices)
    words = [f"{count} x {name}" for name, count in kinds.items()] or ["no device"]
    words += [number_of(len(node.nics), "NIC")] if node.nics else []
    if (num_numa_nodes := len({device.numa_node for device in node.devices} - {None})) > 1:
        words.append(f"{num_numa_nodes} NUMA nodes")
    return f"{node.hostname}: {', '.join(words)}" if node.hostname else ", ".join(words)


def _parts_table(node: Node) -> Grid:
    """What is known of devices and network cards beyond their links."""
    headings = ("", "name", "memory", "NUMA", "PCI", "busy")
    rows = [
        (
            device.label,
            "" if device.name == device.label else device.name,
            size(device.memory_bytes) if device.memory_bytes else "",
            "" if device.numa_node is None else str(device.numa_node),
            device.pci_bus_id,
            device.busy,
        )
        for device in (() if node.device_kind == "cpu" else node.devices)
    ]
    rows += [(label, "" if name == label else name, "", "", "", "") for label, name in node.nics.items()]
    return grid_of([(heading, itemgetter(place)) for place, heading in enumerate(headings)], rows, left=headings)


def _matrices(node: Node, width: int, ring: Sequence[int]) -> list[RenderableType]:
    """The matrix, in as many tables as it takes columns to fit into the width."""
    rows = [device.label for device in node.devices]
    columns = [*rows, *node.nics]
    hops = {frozenset((f"GPU{ring[place - 1]}", f"GPU{end}")) for place, end in enumerate(ring)}

    def cell(row: str, column: str) -> Text:
        link = node.link(row, column)
        if row == column or link is None:
            return Text("X" if row == column else NOTHING, style="dim")
        mark = MARK if {row, column} in hops else ""
        return Text(f"{link.label}{mark}", style=_STYLES[label_class(link.label)])

    widest = max(map(len, (*columns, *(f"{link.label}{MARK}" for link in node.links)))) + 2
    per_table = max(1, (width - widest) // widest)
    tables: list[RenderableType] = []
    for start in range(0, len(columns), per_table):
        part = columns[start : start + per_table]
        found = table("", *part, left=("", *part), whole=("", *part))
        for row in rows:
            found.add_row(row, *(cell(row, column) for column in part))
        tables += [Text(), found]
    return tables


# --- The choice ---


def choice_lines(choice: DeviceChoice) -> list[str]:
    """What was chosen, why, what a naive choice would cost, and, last, the line that makes a program use it."""
    ring, naive = choice.ring, choice.naive
    lines = [f"Use {device_words(sorted(ring.devices))}."]
    if len(ring.devices) > 2:
        lines.append(f"The best ring is {ring_words(ring.devices)}; its slowest link is {link_text(ring.bottleneck)}.")
    elif len(ring.devices) == 2:
        lines.append(f"The link between them: {link_text(ring.bottleneck)}.")
    if not choice.is_exact:
        lines.append("Only GPUs with neighbouring ids were compared: a better ring may exist.")
    naive_s, best_s = all_reduce_1_gb_s(naive), all_reduce_1_gb_s(ring)
    if len(ring.devices) > 1 and (naive.devices == ring.devices or naive_s == best_s is not None):
        lines.append("A naive choice, the first ones in the order of their ids, is as fast.")
    elif len(ring.devices) > 1:
        slow = link_text(naive.bottleneck)
        said = f"A naive choice, {device_words(naive.devices)} in this order, has {slow} as its slowest link"
        if naive_s and best_s:
            said += f" and would all_reduce 1 GB in {duration(naive_s)} instead of {duration(best_s)}, "
            said += f"{times(naive_s / best_s)} the time"
        lines.append(f"{said}.")
    return [*lines, " ".join(f"{name}={value}" for name, value in visible_devices(ring.devices).items())]


def all_reduce_1_gb_s(ring: DeviceRing) -> float | None:
    """2 (n - 1) / n of 1e9 bytes over the slowest link (Patarasuk and Yuan 2009); None where its rate is not known."""
    n, rate = len(ring.devices), None if ring.bottleneck is None else ring.bottleneck.bytes_per_s
    return 0.0 if n == 1 else 2 * (n - 1) / n * 1e9 / rate if rate else None


def visible_devices(devices: Sequence[int]) -> dict[str, str]:
    """The variables that show a program these devices, in this order."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}


def device_words(devices: Sequence[int]) -> str:
    """ "GPU 3", "GPUs 0, 1 and 3"."""
    return f"GPU{'s' * (len(devices) != 1)} {listing(list(map(str, devices)))}"


def ring_words(devices: Sequence[int]) -> str:
    """ "0 - 3 - 2 - 1 - 0"."""
    return " - ".join(map(str, [*devices, devices[0]]))


def topology_mapping(node: Node, choice: DeviceChoice | None) -> dict[str, Any]:
    """The result of `paceline topo --json`; lists are empty and the rest is null where there is no GPU."""

    def ring_mapping(ring: DeviceRing | None) -> dict[str, Any]:
        link = ring and ring.bottleneck
        return {
            "ring": list(ring.devices) if ring else [],
            "bottleneck": link and {"label": link.label, "bytes_per_s": link.bytes_per_s},
            "all_reduce_1_gb_s": ring and all_reduce_1_gb_s(ring),
        }

    devices = sorted(choice.ring.devices) if choice else []
    pairs = {f"{one}-{other}": node.link(f"GPU{one}", f"GPU{other}") for one, other in combinations(devices, 2)}
    return {
        "hostname": node.hostname,
        "devices": devices,
        **ring_mapping(choice.ring if choice else None),
        "pairs": {pair: link.label for pair, link in pairs.items() if link},
        "is_exact": choice and choice.is_exact,
        "naive": choice and ring_mapping(choice.naive),
        "environment": visible_devices(choice.ring.devices) if choice else {},
        "notes": list(node.notes),
    }
