"""A node's wires and the devices chosen on it: a table for the terminal, sentences, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.report.formats import NOTHING, duration, times
from paceline.report.tables import Grid, grid_of, plain_table, table
from paceline.spec import Device, Link, Node, Peripheral
from paceline.spec.device_choice import DeviceChoice, DeviceRing
from paceline.words import listing, number_of

RING_MARK = "*"
"""Stands after the links of the ring, so that it survives a pipe without colours."""

NAIVE_SIZE_BYTES = 1e9

_LABELS = {
    "PIX": ("PCIe", "through one PCIe bridge"),
    "PXB": ("PCIe", "through several PCIe bridges without crossing a host bridge"),
    "PHB": ("host", "through a PCIe host bridge, which is part of the CPU"),
    "NODE": ("host", "between PCIe host bridges of one NUMA node"),
    "SYS": ("sockets", "across the link between the sockets"),
}
"""Kind of wire, and what `nvidia-smi topo -m` prints in its own words as a legend; the nearest first."""

_STYLES = {"NVLink": "bold green", "PCIe": "cyan", "host": "yellow", "sockets": "red", "other": ""}


def label_words(label: str) -> str:
    """What a link with this label goes through, to follow on "they talk"."""
    if bonds := num_nvlinks(label):
        return "over one NVLink" if bonds == 1 else f"over {bonds} NVLinks"
    return _LABELS.get(label, ("", "in a way that has no name here"))[1]


def num_nvlinks(label: str) -> int:
    """The number in a label NV1 … NV18; 0 for every other label."""
    bonds = label.removeprefix("NV")
    return int(bonds) if bonds != label and bonds.isdecimal() else 0


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


def pair_sentence(node: Node, one: str, other: str) -> str:
    """How two parts of a node, by their labels, reach each other and how fast.

    "GPU0 and GPU1 talk through several PCIe bridges without crossing a host bridge (PXB), about 12 GB/s."
    """
    link = node.link(one, other)
    if link is None:
        return f"Nothing is known of the link between {one} and {other}."
    rate = label_bandwidth(replace(node, links=(link,)), link.label) or "at a bandwidth nobody knows"
    return f"{one} and {other} talk {label_words(link.label)} ({link.label}), {rate}."


# --- The table ---


def node_view(node: Node, width: int, ring: Sequence[int] = ()) -> RenderableType:
    """Everything there is on a node: title, parts, matrix with its legend, notes.

    Args:
        width: Columns of text that fit; a wider matrix goes on below.
        ring: Indices of devices in the order of a ring to mark.
    """
    parts: list[RenderableType] = [Text(title(node), style="bold")]
    if node.device_kind == "cpu":
        memory = f", {memory_text(node.memory_bytes)} of memory" if node.memory_bytes else ""
        parts.append(Text(f"{node.num_cores} cores{memory}, {node.cpu_name}"))
    known = _parts_table(node)
    if len(known.headings) > 1:
        parts += [Text(), known]
    if node.device_kind != "cpu" and node.links:
        parts += [*_matrices(node, width, ring), *_legend(node, ring)]
    if node.notes:
        parts += [Text(), *map(Text, node.notes)]
    if node.device_kind == "cpu":
        parts.append(Text("No GPU was found: training runs on CPU workers, and there are no links to draw."))
    return Group(*parts)


def title(node: Node) -> str:
    """ "gpu-7: 8 x NVIDIA H100 80GB HBM3, 8 NICs, 2 NUMA nodes"."""
    kinds: dict[str, int] = {}
    for device in node.devices:
        name = device.name or ("GPU" if device.kind == "cuda" else "CPU core")
        kinds[name] = kinds.get(name, 0) + 1
    numa_nodes = {device.numa_node for device in node.devices} - {None}
    words = [f"{count} x {name}" for name, count in kinds.items()] or ["no device"]
    num_nics = sum(peripheral.kind == "nic" for peripheral in node.peripherals)
    if num_nics:
        words.append(number_of(num_nics, "NIC"))
    if len(numa_nodes) > 1:
        words.append(f"{len(numa_nodes)} NUMA nodes")
    return f"{node.hostname}: {', '.join(words)}" if node.hostname else ", ".join(words)


def _parts_table(node: Node) -> Grid:
    """What is known of devices and peripherals beyond their links."""
    columns: list[tuple[str, Callable[[Device | Peripheral], str]]] = [
        ("", lambda part: part.label),
        ("name", lambda part: "" if part.name == part.label else part.name),
        ("memory", lambda part: memory_text(part.memory_bytes) if isinstance(part, Device) else ""),
        ("speed", lambda part: bandwidth_text(part.bytes_per_s) if isinstance(part, Peripheral) else ""),
        ("NUMA", lambda part: "" if part.numa_node is None else str(part.numa_node)),
        ("PCI", lambda part: part.pci_bus_id),
        ("busy", lambda part: part.busy if isinstance(part, Device) else ""),
    ]
    devices = () if node.device_kind == "cpu" else node.devices
    parts: list[Device | Peripheral] = [*devices, *node.peripherals]
    return grid_of(columns, parts, left=[heading for heading, _ in columns])


def memory_text(num_bytes: int) -> str:
    """ "80 GiB"; empty where it is not known."""
    return f"{num_bytes / 2**30:.0f} GiB" if num_bytes else ""


def _matrices(node: Node, width: int, ring: Sequence[int]) -> list[RenderableType]:
    """The matrix, in as many tables as it takes columns to fit into the width."""
    rows = [device.label for device in node.devices]
    columns = [*rows, *(part.label for part in node.peripherals)]
    hops = {frozenset((f"GPU{ring[place - 1]}", f"GPU{end}")) for place, end in enumerate(ring)}
    cells = {(row, column): _cell(node, row, column, hops) for row in rows for column in columns}
    widest = max(len(text) for text in (*columns, *map(str, cells.values()))) + 2
    num_columns = max(1, (width - widest) // widest)
    tables: list[RenderableType] = []
    for start in range(0, len(columns), num_columns):
        part = columns[start : start + num_columns]
        found = table("", *part, left=("", *part), no_wrap=True)
        for row in rows:
            found.add_row(row, *(cells[row, column] for column in part))
        tables += [Text(), found]
    return tables


def _cell(node: Node, row: str, column: str, hops: set[frozenset[str]]) -> Text:
    link = node.link(row, column)
    if row == column or link is None:
        return Text("X" if row == column else NOTHING, style="dim")
    is_hop = frozenset((row, column)) in hops
    style = f"{_STYLES[label_class(link.label)]}{' reverse' if is_hop else ''}".strip()
    return Text(f"{link.label}{RING_MARK if is_hop else ''}", style=style)


def _legend(node: Node, ring: Sequence[int]) -> list[RenderableType]:
    found = plain_table(
        (
            Text(label, style=_STYLES[label_class(label)]),
            label_words(label)[0].upper() + label_words(label)[1:],
            label_bandwidth(node, label),
        )
        for label in labels_in_use(node)
    )
    return [Text(), found, *([Text(f"{RING_MARK} a link of the ring")] if len(ring) > 1 else [])]


def labels_in_use(node: Node) -> list[str]:
    """Each label once, the fastest kind of wire first."""
    kinds, near = list(_STYLES), list(_LABELS)

    def order(label: str) -> tuple[int, int, int, str]:
        place = near.index(label) if label in near else len(near)
        return kinds.index(label_class(label)), -num_nvlinks(label), place, label

    return sorted({link.label for link in node.links}, key=order)


def label_bandwidth(node: Node, label: str) -> str:
    """What links of this label carry in one direction, the range if they differ, and whether that was measured."""
    links = [link for link in node.links if link.label == label and link.bytes_per_s is not None]
    if not links:
        return ""
    rates = [link.bytes_per_s or 0.0 for link in links]
    words = " to ".join(dict.fromkeys([bandwidth_text(min(rates)), bandwidth_text(max(rates))]))
    return f"{words} measured" if all(link.source == "measured" for link in links) else f"about {words}"


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
        lines.append("This ring was found by improving step by step, not by trying all: a better one may exist.")
    naive_s, best_s = naive.all_reduce_s(NAIVE_SIZE_BYTES), ring.all_reduce_s(NAIVE_SIZE_BYTES)
    if len(ring.devices) > 1 and naive.devices == ring.devices:
        lines.append("A naive choice, the first ones in the order of their ids, is the same.")
    elif len(ring.devices) > 1:
        cost = ""
        if naive_s is not None and best_s is not None:
            cost = (
                f" and would all_reduce 1 GB in {duration(naive_s)} instead of {duration(best_s)}, "
                f"{times(naive_s / best_s)} the time"
            )
        lines.append(
            f"A naive choice, {device_words(naive.devices)} in this order, has {link_text(naive.bottleneck)} as its "
            f"slowest link{cost}."
        )
    return [*lines, " ".join(f"{name}={value}" for name, value in visible_devices(ring.devices).items())]


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
    devices = sorted(choice.ring.devices) if choice else []
    links = {(one, other): node.link(f"GPU{one}", f"GPU{other}") for one, other in combinations(devices, 2)}
    ring = {"ring": [], "bottleneck": None, "all_reduce_1_gb_s": None} if choice is None else _ring_mapping(choice.ring)
    return {
        "hostname": node.hostname,
        "devices": devices,
        **ring,
        "pairs": {f"{one}-{other}": link.label for (one, other), link in links.items() if link},
        "is_exact": choice.is_exact if choice else None,
        "naive": _ring_mapping(choice.naive) if choice else None,
        "environment": visible_devices(choice.ring.devices) if choice else {},
        "notes": list(node.notes),
    }


def _ring_mapping(ring: DeviceRing) -> dict[str, Any]:
    link = ring.bottleneck
    return {
        "ring": list(ring.devices),
        "bottleneck": None if link is None else {"label": link.label, "bytes_per_s": link.bytes_per_s},
        "all_reduce_1_gb_s": ring.all_reduce_s(NAIVE_SIZE_BYTES),
    }
