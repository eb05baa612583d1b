"""A node's wires and the devices chosen on it: a table for the terminal, sentences, and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from paceline.report.formats import NOTHING, duration, times
from paceline.report.tables import plain_table, table
from paceline.spec import Device, Link, Node, Peripheral
from paceline.spec.device_choice import DeviceChoice, DeviceRing
from paceline.words import listing, number_of

RING_MARK = "*"
"""Stands after the links of the ring, so that it survives a pipe without colours."""

NAIVE_SIZE_BYTES = 1e9

_GUTTER = 2
"""Spaces between the columns of a table."""

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

    "GPU 0 and GPU 1 talk through several PCIe bridges without crossing a host bridge (PXB), about 12 GB/s."
    """
    link = node.link(one, other)
    names = f"{_spaced(one)} and {_spaced(other)}"
    if link is None:
        return f"Nothing is known of the link between {names}."
    if link.bytes_per_s is None:
        figure = "at a bandwidth nobody knows"
    elif link.source == "measured":
        figure = f"{bandwidth_text(link.bytes_per_s)} measured"
    else:
        figure = f"about {bandwidth_text(link.bytes_per_s)}"
    return f"{names} talk {label_words(link.label)} ({link.label}), {figure}."


def _spaced(label: str) -> str:
    """ "GPU0" as "GPU 0"."""
    letters = label.rstrip("0123456789")
    return f"{letters} {label[len(letters) :]}" if letters and letters != label else label


# --- The table ---


def node_view(node: Node, width: int, ring: Sequence[int] = ()) -> RenderableType:
    """Everything there is on a node: title, parts, matrix with its legend, notes.

    Args:
        width: Columns of text that fit; a wider matrix goes on below.
        ring: Indices of devices in the order of a ring to mark.
    """
    parts: list[RenderableType] = [Text(title(node), style="bold"), *_parts_tables(node)]
    is_cpu = node.device_kind == "cpu"
    if not is_cpu and len(node.devices) + len(node.peripherals) > 1:
        parts += [Text(), *_matrices(node, width, ring), *_legend(node, ring)]
    if node.notes:
        parts += [Text(), *map(Text, node.notes)]
    if is_cpu:
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


def _parts_tables(node: Node) -> list[RenderableType]:
    """What is known of devices and peripherals beyond their links: tables, or lines where there is little to say."""
    if node.device_kind == "cpu":
        parts: list[RenderableType] = [
            Text(f"{node.num_cores} cores, {_memory_text(node.memory_bytes)} of memory, {node.cpu_name}")
        ]
    else:
        parts = _facts([(device.label, _device_facts(device)) for device in node.devices], _numa_lines(node))
    names = [f"{part.label} {part.name}" for part in node.peripherals if part.name != part.label]
    rows = [(part.label, _peripheral_facts(part)) for part in node.peripherals]
    return [*parts, *_facts(rows, [", ".join(names)] if names else [])]


def _numa_lines(node: Node) -> list[str]:
    by_numa: dict[int, list[str]] = {}
    for device in node.devices:
        if device.numa_node is not None:
            by_numa.setdefault(device.numa_node, []).append(device.label)
    return [f"NUMA node {numa_node}: {', '.join(labels)}" for numa_node, labels in sorted(by_numa.items())]


def _device_facts(device: Device) -> dict[str, str]:
    return {
        "name": device.name,
        "memory": _memory_text(device.memory_bytes),
        "NUMA": _text(device.numa_node),
        "PCI": device.pci_bus_id,
        "busy": device.busy,
    }


def _peripheral_facts(part: Peripheral) -> dict[str, str]:
    return {
        "name": part.name,
        "speed": "" if part.bytes_per_s is None else bandwidth_text(part.bytes_per_s),
        "NUMA": _text(part.numa_node),
        "PCI": part.pci_bus_id,
    }


def _facts(rows: Sequence[tuple[str, Mapping[str, str]]], otherwise: Sequence[str]) -> list[RenderableType]:
    """A table without the columns of which nothing is known, or the lines where no more is known than they say."""
    columns = [name for name in (rows[0][1] if rows else {}) if any(facts[name] for _, facts in rows)]
    if not set(columns) - {"name", "NUMA"}:
        return [Text(line) for line in otherwise]
    found = table("", *columns, left=("", *columns), no_wrap=True)
    for label, facts in rows:
        found.add_row(label, *(Text(facts[name] or NOTHING) for name in columns))  # brackets are no markup
    return [Text(), found]


def _memory_text(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.0f} GiB" if num_bytes else ""


def _text(value: object | None) -> str:
    return "" if value is None else str(value)


def _matrices(node: Node, width: int, ring: Sequence[int]) -> list[RenderableType]:
    """The matrix, in as many tables as it takes columns to fit into the width."""
    rows = [device.label for device in node.devices]
    columns = [*rows, *(part.label for part in node.peripherals)]
    hops = {frozenset((f"GPU{ring[place - 1]}", f"GPU{end}")) for place, end in enumerate(ring)}
    cells = {(row, column): _cell(node, row, column, hops) for row in rows for column in columns}
    widths = {one: max(len(one), *(len(cells[row, one]) for row in rows)) + _GUTTER for one in columns}
    room = width - max(map(len, rows)) - _GUTTER
    parts: list[list[str]] = []
    for column in columns:
        if not parts or sum(widths[one] for one in (*parts[-1], column)) > room:
            parts.append([])
        parts[-1].append(column)
    tables: list[RenderableType] = []
    for part in parts:
        tables.append(found := table("", *part, left=("", *part), no_wrap=True))
        for row in rows:
            found.add_row(row, *(cells[row, column] for column in part))
    return tables


def _cell(node: Node, row: str, column: str, hops: set[frozenset[str]]) -> Text:
    if row == column:
        return Text("X", style="dim")
    link = node.link(row, column)
    if link is None:
        return Text(NOTHING, style="dim")
    is_hop = frozenset((row, column)) in hops
    style = f"{_STYLES[label_class(link.label)]}{' reverse' if is_hop else ''}".strip()
    return Text(f"{link.label}{RING_MARK if is_hop else ''}", style=style)


def _legend(node: Node, ring: Sequence[int]) -> list[RenderableType]:
    rows = []
    for label in labels_in_use(node):
        words = label_words(label)
        name = Text(label, style=_STYLES[label_class(label)])
        rows.append((name, words[0].upper() + words[1:], label_bandwidth(node, label)))
    lines: list[RenderableType] = [Text(), plain_table(rows)] if rows else []
    return [*lines, Text(f"{RING_MARK} a link of the ring")] if len(ring) > 1 else lines


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
    figures = sorted({link.bytes_per_s for link in links if link.bytes_per_s is not None})
    if not figures:
        return ""
    ends = list(dict.fromkeys([bandwidth_text(figures[0]), bandwidth_text(figures[-1])]))
    if all(link.source == "measured" for link in links):
        return f"{' to '.join(ends)} measured"
    return f"about {' to '.join(ends)}"


# --- The choice ---


def choice_lines(choice: DeviceChoice) -> list[str]:
    """What was chosen, why, what a naive choice would cost, and, last, the line that makes a program use it."""
    ring = choice.ring
    count = len(ring.devices)
    lines = [f"Use {device_words(sorted(ring.devices))}."]
    if count > 2:
        around = " - ".join(map(str, [*ring.devices, ring.devices[0]]))
        lines.append(f"The best ring is {around}; its slowest link is {link_text(ring.bottleneck)}.")
    elif count == 2:
        lines.append(f"The link between them: {link_text(ring.bottleneck)}.")
    if not choice.is_exact:
        lines.append("This ring was found by improving step by step, not by trying all: a better one may exist.")
    if count > 1:
        lines.append(_naive_sentence(choice))
    return [*lines, " ".join(f"{name}={value}" for name, value in visible_devices(ring.devices).items())]


def visible_devices(devices: Sequence[int]) -> dict[str, str]:
    """The variables that show a program these devices, in this order."""
    listed = ",".join(map(str, devices))
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": listed}


def device_words(devices: Sequence[int]) -> str:
    """ "GPU 3", "GPUs 0, 1 and 3"."""
    return f"GPU{'s' * (len(devices) != 1)} {listing(list(map(str, devices)))}"


def _naive_sentence(choice: DeviceChoice) -> str:
    """The cost of the first devices in the order of their ids, by the ring all-reduce formula, for one gigabyte."""
    if choice.naive.devices == choice.ring.devices:
        return "A naive choice, the first ones in the order of their ids, is the same."
    naive_s, best_s = (ring.all_reduce_s(NAIVE_SIZE_BYTES) for ring in (choice.naive, choice.ring))
    what = f"A naive choice, {device_words(choice.naive.devices)} in this order"
    if naive_s is None or best_s is None:
        return f"{what}, has {link_text(choice.naive.bottleneck)} as its slowest link."
    if naive_s <= best_s:
        return f"{what}, has a bottleneck as fast: {link_text(choice.naive.bottleneck)}."
    return (
        f"{what}, would all_reduce 1 GB in {duration(naive_s)} instead of {duration(best_s)}, "
        f"{times(naive_s / best_s)} the time: its slowest link is {link_text(choice.naive.bottleneck)}."
    )


def topology_mapping(node: Node, choice: DeviceChoice | None) -> dict[str, Any]:
    """The result of `paceline topo --json`; lists are empty and the rest is null where there is no GPU."""
    devices = sorted(choice.ring.devices) if choice else []
    links = {(one, other): node.link(f"GPU{one}", f"GPU{other}") for one, other in combinations(devices, 2)}
    return {
        "hostname": node.hostname,
        "devices": devices,
        "ring": list(choice.ring.devices) if choice else [],
        "bottleneck": _link_mapping(choice.ring.bottleneck) if choice else None,
        "pairs": {f"{one}-{other}": link.label for (one, other), link in links.items() if link},
        "is_exact": choice.is_exact if choice else None,
        "all_reduce_1_gb_s": choice.ring.all_reduce_s(NAIVE_SIZE_BYTES) if choice else None,
        "naive": _naive_mapping(choice.naive) if choice else None,
        "environment": visible_devices(choice.ring.devices) if choice else {},
        "notes": list(node.notes),
    }


def _link_mapping(link: Link | None) -> dict[str, Any] | None:
    return None if link is None else {"label": link.label, "bytes_per_s": link.bytes_per_s}


def _naive_mapping(ring: DeviceRing) -> dict[str, Any]:
    return {
        "ring": list(ring.devices),
        "bottleneck": _link_mapping(ring.bottleneck),
        "all_reduce_1_gb_s": ring.all_reduce_s(NAIVE_SIZE_BYTES),
    }
