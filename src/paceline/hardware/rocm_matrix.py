"""The tables that `rocm-smi --showtopo` prints about AMD GPUs, as a node.

Hops say 1 for XGMI whatever lies between, 2 for a way through one processor and 3 through two (AMD Instinct MI200
system optimization guide). The weight says more: 15 for each XGMI link on the way, 20 for each PCIe segment
(amdsmi_topo_get_link_weight).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import ClusterError
from paceline.hardware.pair_links import links_of_pairs
from paceline.hardware.square_table import square_cells
from paceline.spec import Device, Link, Node

WEIGHT_OF_XGMI = 15
SLOWEST_MODEL = "MI100"
"""The tables name no GPU; this one has the slowest links of those with a figure."""

_GPU = re.compile(r"GPU(\d{1,4})", re.ASCII)
_NUMA = re.compile(r"GPU\[(\d{1,4})\]\s*: \(Topology\) Numa Node: (-?\d{1,4})\s*", re.ASCII)


def is_rocm(text: str) -> bool:
    return "Link Type between two GPUs" in text


def parse_rocm(text: str) -> Node:
    """The GPUs and links of a node from its `rocm-smi --showtopo`.

    The tables know neither models nor memory nor cores. An XGMI way over several links gets the bandwidth of one link
    divided by their number, which it loads all.

    Raises:
        ClusterError: a table that is missing or does not agree with itself; names row and column.
    """
    lines = text.splitlines()
    kinds = _table("Link Type", lines, r"XGMI|PCIE")
    hops = _table("Hops", lines, r"\d{1,4}")
    weights = _table("Weight", lines, r"\d{1,6}")
    numa_nodes = {int(found[1]): int(found[2]) for line in lines if (found := _NUMA.fullmatch(line))}
    labels = [row for row, column in kinds if row == column]
    if not labels:
        raise ClusterError("There is no table of link types here; give the whole output of rocm-smi --showtopo.")

    def label_of(one: str, other: str) -> str:
        if kinds[one, other] == "XGMI":
            return "XGMI"
        return "PHB" if hops.get((one, other)) == "2" else "SYS"

    def carried(link: Link) -> Link:
        num_links = max(1, int(weights.get(link.ends, "0")) // WEIGHT_OF_XGMI)
        if link.label != "XGMI" or link.bytes_per_s is None:
            return link
        return replace(link, bytes_per_s=link.bytes_per_s / num_links)

    known = [numa_nodes.get(index, -1) for index in range(len(labels))]
    devices = [
        Device("cuda", index, "AMD GPU", 0, numa_node=None if numa_node < 0 else numa_node)
        for index, numa_node in enumerate(known)
    ]
    links = links_of_pairs(devices, (), label_of, dict.fromkeys(labels, SLOWEST_MODEL))
    return Node("", 0, 0, "", tuple(devices), links=tuple(map(carried, links)))


def _table(title: str, lines: Sequence[str], allowed: str) -> dict[tuple[str, str], str]:
    """The cells of one table by row and column; empty if it is not there."""
    start = next((i for i, line in enumerate(lines) if f"{title} between two GPUs" in line), None)
    if start is None:
        return {}
    columns: list[str] = []
    rows: list[tuple[str, list[str]]] = []
    for line in itertools.takewhile(lambda line: not line.startswith("==="), lines[start + 1 :]):
        words = line.split()
        if words and not columns and all(map(_GPU.fullmatch, words)):
            columns = words
        elif words and _GPU.fullmatch(words[0]):
            rows.append((words[0], words[1:]))
    if columns != [f"GPU{index}" for index in range(len(columns))]:
        raise ClusterError(f"The columns of the table '{title}' are not GPU0, GPU1 and so on.")
    return square_cells(f"the table '{title}'", columns, rows, "0", allowed)
