"""The tables that `rocm-smi --showtopo` prints about AMD GPUs, as a node.

Hops say 1 for XGMI whatever lies between, 2 for a way through one processor and 3 through two (AMD Instinct MI200
system optimization guide). The weight says more: 15 for each XGMI link on the way, 20 for each PCIe segment
(amdsmi_topo_get_link_weight).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.errors import ClusterError
from paceline.hardware.datasheet import link_bytes_per_s
from paceline.spec import Device, Link, Node

WEIGHT_OF_XGMI = 15
UNNAMED = ("MI100",)
"""The tables name no GPU; this one has the slowest links of those with a figure."""

_GPU = re.compile(r"GPU(\d{1,4})", re.ASCII)
_NUMA = re.compile(r"GPU\[(\d{1,4})\]\s*: \(Topology\) Numa Node: (-?\d{1,4})\s*", re.ASCII)


def is_rocm(text: str) -> bool:
    return "Link Type between two GPUs" in text


def parse_rocm(text: str, hostname: str = "") -> Node:
    """The GPUs and links of a node from its `rocm-smi --showtopo`.

    The tables know neither names nor memory nor cores. An XGMI way over several links gets the bandwidth of one link
    divided by their number, which it loads all.

    Raises:
        ClusterError: a table that is missing or does not agree with itself; names row and column.
    """
    lines = text.splitlines()
    kinds = _table("Link Type", lines, r"XGMI|PCIE")
    hops = _table("Hops", lines, r"\d{1,4}")
    weights = _table("Weight", lines, r"\d{1,6}")
    numa_nodes = {int(found[1]): int(found[2]) for line in lines if (found := _NUMA.fullmatch(line))}
    indices = sorted({row for row, _ in kinds})
    if not indices:
        raise ClusterError("There is no table of link types here; give the whole output of rocm-smi --showtopo.")
    devices = [Device("cuda", index, "", 0, numa_node=_known(numa_nodes.get(index, -1))) for index in indices]
    links = []
    for one in devices:
        for other in devices[one.index + 1 :]:
            pair = (one.index, other.index)
            if kinds[pair] == "XGMI":
                num_links = max(1, int(weights.get(pair, "0")) // WEIGHT_OF_XGMI)
                links.append(
                    Link((one.label, other.label), "XGMI", (link_bytes_per_s("XGMI", UNNAMED) or 0.0) / num_links)
                )
            else:
                label = "PHB" if hops.get(pair) == "2" else "SYS"
                links.append(Link((one.label, other.label), label, link_bytes_per_s(label, UNNAMED)))
    return Node(hostname, 0, 0, "", tuple(devices), links=tuple(links))


def _known(numa_node: int) -> int | None:
    return None if numa_node < 0 else numa_node


def _table(title: str, lines: Sequence[str], allowed: str) -> dict[tuple[int, int], str]:
    """The cells of one table by row and column, without the diagonal; empty if it is not there."""
    start = next((i for i, line in enumerate(lines) if f"{title} between two GPUs" in line), None)
    if start is None:
        return {}
    columns: list[int] = []
    cells: dict[tuple[int, int], str] = {}
    rows: set[int] = set()
    for line in lines[start + 1 :]:
        words = line.split()
        if line.startswith("==="):
            break
        gpus = [int(found[1]) for word in words if (found := _GPU.fullmatch(word))]
        if words and len(gpus) == len(words) and not columns:
            if gpus != list(range(len(gpus))):
                raise ClusterError(f"The columns of the table '{title}' are not GPU0, GPU1 and so on.")
            columns = gpus
        elif gpus and words[0] == f"GPU{gpus[0]}":
            if gpus[0] in rows or gpus[0] not in columns:
                raise ClusterError(f"The table '{title}' has a row GPU{gpus[0]} twice or without a column.")
            rows.add(gpus[0])
            cells.update(_row(title, gpus[0], words[1:], columns, allowed))
    for column in columns:
        if column not in rows:
            raise ClusterError(f"The table '{title}' has a column GPU{column} but no row of that name.")
    for (row, column), cell in cells.items():
        if cells[column, row] != cell:
            raise ClusterError(
                f"Row GPU{row}, column GPU{column} of the table '{title}' says {cell}, but row GPU{column}, "
                f"column GPU{row} says {cells[column, row]}; a link is the same in both directions."
            )
    return cells


def _row(
    title: str, row: int, words: Sequence[str], columns: Sequence[int], allowed: str
) -> dict[tuple[int, int], str]:
    if len(words) != len(columns):
        raise ClusterError(f"Row GPU{row} of the table '{title}' has {len(words)} cells for {len(columns)} columns.")
    for column, word in zip(columns, words, strict=True):
        if not re.fullmatch("0" if row == column else allowed, word, re.ASCII):
            raise ClusterError(f"Row GPU{row}, column GPU{column} of the table '{title}' says {word[:40]!r}.")
    return {(row, column): word for column, word in zip(columns, words, strict=True) if row != column}
