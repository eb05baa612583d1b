"""The matrix that `nvidia-smi topo -m` prints, of any driver, as a node.

Read line by line: whatever stands before the header is a preamble (`nvidia-smi -L` there gives the GPUs their names),
then one row for each column, then legends. Cells are words; tabs, runs of spaces and table bars only separate them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import ClusterError
from paceline.hardware.cpu_list import parse_cpus
from paceline.hardware.pair_links import links_of_pairs, num_cores
from paceline.spec import Device, Node, Peripheral

LABELS = ("SYS", "NODE", "PHB", "PXB", "PIX", *(f"NV{count}" for count in range(1, 19)))
OLD_NAMES = {"SOC": "SYS"}
"""Drivers before 384 called the way between sockets SOC."""

GPU_NUMA_ID = "GPU NUMA ID"
AFFINITIES = ("CPU Affinity", "NUMA Affinity", GPU_NUMA_ID)
"""The columns behind the labels, as far as a driver prints them."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GPU = re.compile(r"GPU(0|[1-9]\d{0,3})", re.ASCII)
_NIC = re.compile(r"NIC\d{1,4}", re.ASCII)
# A wide matrix loses a tab now and then, in its header (NIC8NIC9) and its rows (NODENODE): vllm-project/vllm#13855.
_GLUED = re.compile(r"(NODE|SYS|PHB|PXB|PIX|(?:NV|GPU|NIC)\d{1,4})(?=NODE|SYS|PHB|PXB|PIX|(?:NV|GPU|NIC)\d)", re.ASCII)
_LISTED_GPU = re.compile(r"\bGPU (\d{1,4}(?:,\d{1,4})*): (.+)", re.ASCII)
_UUID = re.compile(r"(.*)\(UUID: (GPU-[\w-]+)\)")
_LISTED_SLICE = re.compile(r"\s*MIG\s+(\S+)\s+Device\s+\d+:", re.ASCII)
_NIC_LEGEND = re.compile(r"(NIC\d{1,4}):\s+(\S+)", re.ASCII)


def parse_topology(text: str) -> Node:
    """The GPUs, network cards and links of a node from its `nvidia-smi topo -m`.

    The matrix knows neither memory nor, without the lines of `nvidia-smi -L` before it, names: memory_bytes is 0,
    name is "", and bandwidths are the datasheet's defaults. The node has the cores that some GPU is next to.

    Raises:
        ClusterError: no matrix, or one whose rows and columns do not agree; names row and column.
    """
    lines = [_GLUED.sub(r"\1 ", line) for line in _ESCAPES.sub("", text).replace("|", " ").splitlines()]
    start = next((number for number, line in enumerate(lines) if _is_header(line)), None)
    if start is None:
        raise ClusterError(
            "There is no line of column names such as GPU0 here; give the whole output of nvidia-smi topo -m."
        )
    columns, affinities = _header(lines[start])
    rows, legend = _rows(lines[start + 1 :], columns)
    width = len(columns)
    cells = _cells(columns, [(name, [OLD_NAMES.get(word, word) for word in words[:width]]) for name, words in rows])
    told = {name: _affinities(name, words[width:], affinities) for name, words in rows}
    return _node(columns, cells, told, legend, _listing(lines[:start]))


def _cells(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> dict[tuple[str, str], str]:
    """The labels by the names of row and column; X on the diagonal, and the same in both directions.

    Raises:
        ClusterError: rows and columns that do not agree; names row and column.
    """
    cells: dict[tuple[str, str], str] = {}
    for row, words in rows:
        if row not in columns:
            raise ClusterError(f"The topology matrix has a row {row} but no column of that name.")
        if (row, row) in cells:
            raise ClusterError(f"The topology matrix has two rows {row}; every name stands once.")
        if len(words) != len(columns):
            missing = f": column {columns[len(words)]} has none" if len(words) < len(columns) else ""
            raise ClusterError(
                f"Row {row} of the topology matrix has {len(words)} cells for {len(columns)} columns{missing}."
            )
        for column, word in zip(columns, words, strict=True):
            if not (word == "X" if row == column else word in LABELS):
                raise ClusterError(
                    f"Row {row}, column {column} of the topology matrix says {word[:40]!r}, which is not the label of "
                    "a link, or X in the wrong place."
                )
            cells[row, column] = word
    for column in columns:
        if (column, column) not in cells:
            raise ClusterError(f"The topology matrix has a column {column} but no row of that name.")
    for (row, column), cell in cells.items():
        if cells[column, row] != cell:
            raise ClusterError(
                f"Row {row}, column {column} of the topology matrix says {cell}, but row {column}, column {row} says "
                f"{cells[column, row]}; a link is the same in both directions."
            )
    return cells


def _is_header(line: str) -> bool:
    words = line.split()
    return bool(words) and _GPU.fullmatch(words[0]) is not None and not {"X", *LABELS}.intersection(words)


def _header(line: str) -> tuple[list[str], list[str]]:
    """The names of the columns of labels, then those of the columns of affinities."""
    names = " ".join(line.split())
    affinities: list[str] = []
    for affinity in reversed(AFFINITIES):
        if names.endswith(affinity):
            affinities.insert(0, affinity)
            names = names.removesuffix(affinity).rstrip()
    columns = names.split()
    for column, times in Counter(columns).items():
        if times > 1:
            raise ClusterError(f"The topology matrix has {times} columns {column[:40]}; every name stands once.")
    return columns, affinities


def _rows(lines: Sequence[str], columns: Sequence[str]) -> tuple[list[tuple[str, list[str]]], dict[str, str]]:
    """The rows of the matrix with their names, and the names that a legend gives to NICs."""
    rows: list[tuple[str, list[str]]] = []
    legend: dict[str, str] = {}
    in_legend = False
    for line in lines:
        name, *words = line.split() or [""]
        in_legend = in_legend or name == "Legend:"
        entry = _NIC_LEGEND.fullmatch(line.strip())
        if entry:
            legend[entry[1]] = entry[2]
        elif not in_legend and (name in columns or _GPU.fullmatch(name) or _NIC.fullmatch(name)):
            rows.append((name, words))
    return rows, legend


def _affinities(name: str, words: Sequence[str], affinities: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The numbers in the columns behind the labels; none where the driver says nothing."""
    if len(words) > len(affinities):
        raise ClusterError(
            f"Row {name} of the topology matrix has {words[len(affinities)][:40]!r} after its last column"
            f"{f', {affinities[-1]}' if affinities else ''}."
        )
    numbers: dict[str, tuple[int, ...]] = {}
    for affinity, word in zip(affinities, words, strict=False):
        try:
            numbers[affinity] = () if word == "N/A" or affinity == GPU_NUMA_ID else parse_cpus(word)
        except ValueError as problem:
            raise ClusterError(f"Row {name}, column {affinity} of the topology matrix: {problem}.") from None
    return numbers


@dataclass(frozen=True)
class _Listed:
    """A GPU in `nvidia-smi -L`."""

    name: str
    uuid: str
    slices: tuple[str, ...] = ()
    """The profiles of its MIG devices: "3g.20gb"."""


def _listing(lines: Sequence[str]) -> dict[int, _Listed]:
    """GPUs by index from `nvidia-smi -L`, or from the "GPU 0,1: name" of a report on the environment."""
    listed: dict[int, _Listed] = {}
    last: int | None = None
    for line in lines:
        gpu, mig = _LISTED_GPU.search(line), _LISTED_SLICE.match(line)
        if gpu:
            known = _UUID.match(gpu[2])
            for index in map(int, gpu[1].split(",")):
                last = index
                listed[index] = _Listed(known[1].strip(), known[2]) if known else _Listed(gpu[2].strip(), "")
        elif mig and last is not None:
            listed[last] = _Listed(listed[last].name, listed[last].uuid, (*listed[last].slices, mig[1]))
    return listed


def _node(
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], str],
    told: Mapping[str, Mapping[str, tuple[int, ...]]],
    legend: Mapping[str, str],
    listed: Mapping[int, _Listed],
) -> Node:
    indices = {int(found[1]): column for column in columns if (found := _GPU.fullmatch(column))}
    gpus = []
    for index, column in sorted(indices.items()):
        known, numa_nodes = listed.get(index, _Listed("", "")), told[column].get("NUMA Affinity", ())
        # A GPU may be as near to several NUMA nodes: "0-1".
        numa_node = numa_nodes[0] if len(numa_nodes) == 1 else None
        cpus = told[column].get("CPU Affinity", ())
        gpus.append(Device("cuda", index, known.name, 0, known.uuid, numa_node=numa_node, cpus=cpus))
    cards = [column for column in columns if column not in indices.values()]
    nics = [Peripheral("nic", f"NIC{number}", legend.get(card, card)) for number, card in enumerate(cards)]
    # Columns by the label that we give them: old drivers call a card by its name, not NIC0.
    column_of = {gpu.label: indices[gpu.index] for gpu in gpus}
    column_of.update((nic.label, card) for nic, card in zip(nics, cards, strict=True))
    links = links_of_pairs(
        gpus, nics, lambda one, other: cells[column_of[one], column_of[other]], {gpu.label: gpu.name for gpu in gpus}
    )
    notes = [
        f"GPU{index} is split into {len(gpu.slices)} MIG devices ({', '.join(gpu.slices)}), which have no links."
        for index, gpu in sorted(listed.items())
        if gpu.slices
    ]
    return Node("", num_cores(gpus), 0, "", tuple(gpus), tuple(nics), links, tuple(notes))
