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
from paceline.hardware.datasheet import link_bytes_per_s
from paceline.spec import Device, Link, Node, Peripheral

LABELS = frozenset({"X", "SYS", "NODE", "PHB", "PXB", "PIX", *(f"NV{count}" for count in range(1, 19))})
OLD_NAMES = {"SOC": "SYS"}
"""Drivers before 384 called the way between sockets SOC."""

AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
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


@dataclass(frozen=True)
class _MatrixRow:
    labels: tuple[str, ...]
    """One a column of the header."""
    cpus: tuple[int, ...] = ()
    numa_node: int | None = None


def parse_topology(text: str, hostname: str = "") -> Node:
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
    rows, legend = _rows(lines[start + 1 :], columns, affinities)
    _check_square(rows, columns)
    return _node(columns, rows, legend, _listing(lines[:start]), hostname)


def _is_header(line: str) -> bool:
    words = line.split()
    return bool(words) and _GPU.fullmatch(words[0]) is not None and not LABELS.intersection(words)


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


def _rows(
    lines: Sequence[str], columns: Sequence[str], affinities: Sequence[str]
) -> tuple[dict[str, _MatrixRow], dict[str, str]]:
    """The rows of the matrix by name, and the names that a legend gives to NICs."""
    rows: dict[str, _MatrixRow] = {}
    legend: dict[str, str] = {}
    in_legend = False
    for line in lines:
        words = line.split()
        if not words:
            continue
        in_legend = in_legend or words[0] == "Legend:"
        entry = _NIC_LEGEND.fullmatch(line.strip())
        if entry:
            legend[entry[1]] = entry[2]
        elif not in_legend and words[0] in columns:
            if words[0] in rows:
                raise ClusterError(f"The topology matrix has two rows {words[0]}; every name stands once.")
            rows[words[0]] = _row(words[0], words[1:], columns, affinities)
        elif not in_legend and (_GPU.fullmatch(words[0]) or _NIC.fullmatch(words[0])):
            raise ClusterError(f"The topology matrix has a row {words[0]} but no column of that name.")
    return rows, legend


def _row(name: str, cells: Sequence[str], columns: Sequence[str], affinities: Sequence[str]) -> _MatrixRow:
    if len(cells) < len(columns):
        raise ClusterError(
            f"Row {name} of the topology matrix has {len(cells)} labels for {len(columns)} columns: "
            f"column {columns[len(cells)]} has none."
        )
    labels = tuple(OLD_NAMES.get(cell, cell) for cell in cells[: len(columns)])
    for column, label in zip(columns, labels, strict=True):
        if label not in LABELS:
            raise ClusterError(
                f"Row {name}, column {column} of the topology matrix says {label[:40]!r}; "
                "it is one of X, SYS, NODE, PHB, PXB, PIX, NV1 … NV18."
            )
        if (label == "X") != (name == column):
            raise ClusterError(
                f"Row {name}, column {column} of the topology matrix says {label}; "
                "X stands where a row meets the column of its own name, and nowhere else."
            )
    rest = cells[len(columns) :]
    if len(rest) > len(affinities):
        raise ClusterError(
            f"Row {name} of the topology matrix has {rest[len(affinities)][:40]!r} after its last column, "
            f"{(affinities or columns)[-1]}."
        )
    told = dict(zip(affinities, rest, strict=False))
    return _MatrixRow(
        labels, _cores(name, told.get("CPU Affinity", "")), _numa_node(name, told.get("NUMA Affinity", ""))
    )


def _cores(name: str, text: str) -> tuple[int, ...]:
    if text in ("", "N/A"):
        return ()
    try:
        return parse_cpus(text)
    except ValueError as problem:
        raise ClusterError(f"Row {name}, column CPU Affinity of the topology matrix: {problem}.") from None


def _numa_node(name: str, text: str) -> int | None:
    """None also where a GPU is as near to several NUMA nodes: "0-1"."""
    if text in ("", "N/A"):
        return None
    try:
        numa_nodes = parse_cpus(text)
    except ValueError as problem:
        raise ClusterError(f"Row {name}, column NUMA Affinity of the topology matrix: {problem}.") from None
    return numa_nodes[0] if len(numa_nodes) == 1 else None


def _check_square(rows: Mapping[str, _MatrixRow], columns: Sequence[str]) -> None:
    for column in columns:
        if column not in rows:
            raise ClusterError(f"The topology matrix has a column {column} but no row of that name.")
    for i, one in enumerate(columns):
        for j, other in enumerate(columns[:i]):
            there, back = rows[one].labels[j], rows[other].labels[i]
            if there != back:
                raise ClusterError(
                    f"Row {one}, column {other} of the topology matrix says {there}, but row {other}, column {one} "
                    f"says {back}; a link is the same in both directions."
                )


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
            for index in (int(part) for part in gpu[1].split(",")):
                last = index
                listed[index] = _Listed(known[1].strip(), known[2]) if known else _Listed(gpu[2].strip(), "")
        elif mig and last is not None:
            listed[last] = _Listed(listed[last].name, listed[last].uuid, (*listed[last].slices, mig[1]))
    return listed


def _node(
    columns: Sequence[str],
    rows: Mapping[str, _MatrixRow],
    legend: Mapping[str, str],
    listed: Mapping[int, _Listed],
    hostname: str,
) -> Node:
    positions = {column: position for position, column in enumerate(columns)}
    indices = {int(found[1]): column for column in columns if (found := _GPU.fullmatch(column))}
    gpus = []
    for index, column in sorted(indices.items()):
        known = listed.get(index, _Listed("", ""))
        gpus.append(
            Device("cuda", index, known.name, 0, known.uuid, numa_node=rows[column].numa_node, cpus=rows[column].cpus)
        )
    cards = [column for column in columns if column not in indices.values()]
    nics = [Peripheral("nic", f"NIC{number}", legend.get(card, card)) for number, card in enumerate(cards)]
    # Columns by the label that we give them: old drivers call a card by its name, not NIC0.
    column_of = {gpu.label: indices[gpu.index] for gpu in gpus}
    column_of.update((nic.label, card) for nic, card in zip(nics, cards, strict=True))
    links = []
    name_of = {gpu.label: gpu.name for gpu in gpus}
    for position, gpu in enumerate(gpus):
        for other in (*(other.label for other in gpus[position + 1 :]), *(nic.label for nic in nics)):
            label = rows[column_of[gpu.label]].labels[positions[column_of[other]]]
            names = [name_of[end] for end in (gpu.label, other) if end in name_of]
            links.append(Link((gpu.label, other), label, link_bytes_per_s(label, names)))
    cores = {core for gpu in gpus for core in gpu.cpus}
    notes = [
        f"GPU{index} is split into {len(gpu.slices)} MIG devices ({', '.join(gpu.slices)}), which have no links."
        for index, gpu in sorted(listed.items())
        if gpu.slices
    ]
    return Node(hostname, len(cores), 0, "", tuple(gpus), tuple(nics), tuple(links), tuple(notes))
