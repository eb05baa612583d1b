"""Topology files: the matrix that `nvidia-smi topo -m` prints, of any driver, and cluster.json.

A matrix is read line by line: whatever stands before the header is a preamble (`nvidia-smi -L` there gives the GPUs
their names), then one row for each column, then legends. Cells are words; tabs, runs of spaces and table bars only
separate them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import ClusterError, file_problems, shown
from paceline.hardware.datasheet import links_of_pairs
from paceline.spec import Cluster, Device, Node
from paceline.words import number_of

PCIE_LABELS = ("SYS", "NODE", "PHB", "PXB", "PIX")
CPUS, NUMA_NODES = "CPU Affinity", "NUMA Affinity"
AFFINITIES = (CPUS, NUMA_NODES, "GPU NUMA ID")
"""The columns behind the labels, as far as a driver prints them."""
MOST_CORES = 65536
"""No kernel numbers more cores (NR_CPUS is 8192 at most); a longer list is a typing error."""

_ESCAPES = re.compile(r"\x1b?\[[0-9;?]*m|\x1b\[[0-9;?]*[A-Za-z]")
"""Codes of a terminal; those of the underlined header also without the escape character, which pasting loses."""
_PROMPT = re.compile(r"^.*?(?:[$#%>]|topo -m)\s+(?=GPU\d)")
_GPU = re.compile(r"GPU(0|[1-9]\d{0,3})", re.ASCII)
_NIC = re.compile(r"NIC\d{1,4}", re.ASCII)
_LABEL = re.compile(r"[A-Za-z][\w+-]*", re.ASCII)
_KNOWN_LABEL = re.compile(rf"X|{'|'.join(PCIE_LABELS)}|NV\d{{1,3}}", re.ASCII)
# A wide matrix loses a tab now and then, in its header (NIC8NIC9) and its rows (NODENODE): vllm-project/vllm#13855.
_GLUED = re.compile(r"(NODE|SYS|PHB|PXB|PIX|(?:NV|GPU|NIC)\d{1,4})(?=NODE|SYS|PHB|PXB|PIX|(?:NV|GPU|NIC)\d)", re.ASCII)
_LISTED_GPU = re.compile(r"GPU (\d{1,4}(?:,\d{1,4})*): (.+?) *(?:\(UUID: (GPU-[\w-]+)\))?\s*", re.ASCII)
_NIC_LEGEND = re.compile(r"(NIC\d{1,4}):\s+(\S+)", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def read_topology(source: Path | str) -> Cluster:
    """The cluster in a file or text, recognised by its content.

    Known are `nvidia-smi topo -m` (with `nvidia-smi -L` before it, if you like) and cluster.json. Raises `ClusterError`
    where there is no such file, or the text is none of these.

    Args:
        source: A path, or the text itself: a string of several lines, or one that begins like JSON.
    """
    if isinstance(source, str) and (len(source.splitlines()) > 1 or source.startswith("{")):
        return _parse(source)
    path = Path(source)
    with file_problems(f"The topology file {shown(str(source))} cannot be read", ClusterError):
        text = path.read_text("utf-8-sig", errors="replace")
    try:
        return _parse(text)
    except ClusterError as problem:
        raise ClusterError(f"{path}: {problem}") from None


def _parse(text: str) -> Cluster:
    if text.lstrip("\ufeff \t\r\n").startswith("{"):
        return Cluster.from_json(text.lstrip("\ufeff"), "This")
    return Cluster((parse_matrix(text),))


def parse_matrix(text: str) -> Node:
    """The GPUs, network cards and links of a node from its `nvidia-smi topo -m`.

    The matrix knows neither memory nor, without the lines of `nvidia-smi -L` before it, names: memory_bytes is 0, name
    is "", and bandwidths are the datasheet's defaults. The node has the cores that some GPU is next to. A label that is
    not known is kept, has no bandwidth, and a note of the node names it. Raises `ClusterError` where there is none, or
    its rows and columns do not agree; names row and column.
    """
    cleaned = _ESCAPES.sub("", text).replace("|", " ").splitlines()
    lines = [_GLUED.sub(r"\1 ", _PROMPT.sub("", line)) for line in cleaned]
    start = next((number for number, line in enumerate(lines) if _is_header(line)), None)
    if start is None:
        alike = next((line for line in lines if "GPU0" in line), "")
        raise ClusterError(
            "There is no line of column names such as GPU0 here; give the whole output of nvidia-smi topo -m."
            + (f" The line nearest to it is {shown(alike.strip())}." if alike else "")
        )
    columns, affinities = _header(lines[start])
    rows, legend = _rows(lines[start + 1 :], columns)
    cells = _cells(columns, rows)
    gpus = _listed(lines[:start])
    devices = [
        _with_affinities(gpus.get(index, Device("cuda", index, "", 0)), words[len(columns) :], affinities)
        for index, words in sorted((int(name[3:]), words) for name, words in rows if _GPU.fullmatch(name))
    ]
    cards = [column for column in columns if not _GPU.fullmatch(column)]
    nics = {f"NIC{number}": legend.get(card, card) for number, card in enumerate(cards)}
    # Old drivers call a card by its name, not NIC0.
    column_of = dict(zip(nics, cards, strict=True))
    links = links_of_pairs(devices, nics, lambda one, other: cells[one, column_of.get(other, other)])
    unknown = dict.fromkeys(link.label for link in links if not _KNOWN_LABEL.fullmatch(link.label))
    notes = tuple(f"{label} is not a label of a link that is known; such links are ranked last." for label in unknown)
    num_cores = len({core for device in devices for core in device.cpus})
    return Node("", num_cores, 0, "", tuple(devices), nics, links, notes)


def _is_header(line: str) -> bool:
    words = line.split()
    return bool(words) and bool(_GPU.fullmatch(words[0])) and not any(map(_KNOWN_LABEL.fullmatch, words))


def _header(line: str) -> tuple[list[str], list[str]]:
    """The names of the columns of labels, then those of the columns of affinities."""
    names = " ".join(line.split())
    affinities: list[str] = []
    for affinity in reversed(AFFINITIES):
        if names.endswith(affinity):
            affinities.insert(0, affinity)
            names = names.removesuffix(affinity).rstrip()
    return names.split(), affinities


def _rows(lines: Sequence[str], columns: Sequence[str]) -> tuple[list[tuple[str, list[str]]], dict[str, str]]:
    """The rows of the matrix with their names, and the names that a legend gives to NICs."""
    rows: list[tuple[str, list[str]]] = []
    legend: dict[str, str] = {}
    in_legend = False
    for line in lines:
        name, *words = line.split() or [""]
        in_legend = in_legend or name == "Legend:"
        if entry := _NIC_LEGEND.fullmatch(line.strip()):
            legend[entry[1]] = entry[2]
        elif not in_legend and (name in columns or _GPU.fullmatch(name) or _NIC.fullmatch(name)):
            rows.append((name, words))
    return rows, legend


def _cells(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> dict[tuple[str, str], str]:
    """The labels by the names of row and column; X on the diagonal, and the same in both directions. Raises
    `ClusterError` for rows and columns that do not agree; names row and column."""
    names = [row for row, _ in rows]
    for name in dict.fromkeys([*columns, *names]):
        if (columns.count(name), names.count(name)) != (1, 1):
            raise ClusterError(
                f"The topology matrix has {number_of(columns.count(name), 'column')} and "
                f"{number_of(names.count(name), 'row')} {name[:40]}; there should be one of each."
            )
    cells: dict[tuple[str, str], str] = {}
    for row, words in rows:
        if len(words) < len(columns):
            raise ClusterError(
                f"Row {row} of the topology matrix has {len(words)} cells for {len(columns)} columns: column "
                f"{columns[len(words)]} has none."
            )
        for column, word in zip(columns, words, strict=False):
            if not _LABEL.fullmatch(word) or (word == "X") != (row == column):
                raise ClusterError(
                    f"Row {row}, column {column} of the topology matrix says {word[:40]!r}, which is not the label of "
                    "a link, or X in the wrong place."
                )
            cells[row, column] = word
    for (row, column), cell in cells.items():
        if cells[column, row] != cell:
            raise ClusterError(
                f"Row {row}, column {column} of the topology matrix says {cell!r}, but row {column}, column {row} says "
                f"{cells[column, row]!r}; a link is the same in both directions."
            )
    return cells


def _with_affinities(device: Device, words: Sequence[str], affinities: Sequence[str]) -> Device:
    """The device with its cores and NUMA node from the columns behind the labels, as far as the driver says."""
    told = {name: word for name, word in zip(affinities, words, strict=False) if word != "N/A"}
    try:
        cpus = parse_cpus(told[CPUS]) if CPUS in told else ()
        numa_nodes = parse_cpus(told[NUMA_NODES]) if NUMA_NODES in told else ()
    except ValueError as problem:
        raise ClusterError(f"Row {device.label}, columns of affinities, of the topology matrix: {problem}.") from None
    # A GPU may be as near to several NUMA nodes: "0-1".
    return replace(device, cpus=cpus, numa_node=numa_nodes[0] if len(numa_nodes) == 1 else None)


def parse_cpus(text: str) -> tuple[int, ...]:
    """The numbers of "0-3,8", as the kernel writes lists of cores, in ascending order. Raises `ValueError` where the
    text is no such list; its message is a sentence without a full stop."""
    numbers: set[int] = set()
    for item in text.strip().split(","):
        found = _RANGE.fullmatch(item.strip())
        if not found:
            raise ValueError(f"{text[:40]!r} is not a list of numbers such as 0-23,96-119")
        low, high = int(found[1]), int(found[2] or found[1])
        if low > high or high >= MOST_CORES:
            raise ValueError(f"{item.strip()!r} is not a range of numbers below {MOST_CORES}")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))


def _listed(lines: Sequence[str]) -> dict[int, Device]:
    """GPUs by index from `nvidia-smi -L`, or from the "GPU 0,1: name" of a report on the environment."""
    found = [gpu for line in lines if (gpu := _LISTED_GPU.fullmatch(line.strip()))]
    return {
        index: Device("cuda", index, gpu[2], 0, gpu[3] or "") for gpu in found for index in map(int, gpu[1].split(","))
    }
