"""`paceline topo`: the wires inside of a node, and which of its devices to use."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import table_console
from paceline.errors import ClusterError, PacelineError
from paceline.hardware import detect, read_topology
from paceline.plan.pick import pick as pick_devices
from paceline.spec import Cluster, Node
from paceline.spec.device_choice import DeviceChoice


def topo(
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Read nvidia-smi topo -m, rocm-smi --showtopo, an NCCL XML dump or cluster.json; - is standard input.",
        ),
    ] = None,
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which node of a cluster.json with several; the first.")
    ] = None,
    pair: Annotated[
        str | None, typer.Option(metavar="0,1", help="Only say how these two talk; GPU0,NIC1 works as well.")
    ] = None,
    pick: Annotated[
        int | None, typer.Option(metavar="K", help="Choose the K GPUs whose best ring has the fastest slowest link.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the node into an SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON and nothing else.")] = False,
    keep_busy: Annotated[bool, typer.Option("--all", help="Choose among busy GPUs too.")] = False,
) -> None:
    """Show how the GPUs of a node are joined, and choose the best K of them."""
    # Tables need a library that takes its time to load: not for `paceline --help`.
    from paceline.report.topology import pair_sentence, topology_mapping
    from paceline.report.topology_svg import draw_topology

    machine = with_busy_notes(choose_node(_read(source), node), keep_busy=keep_busy)
    free = free_gpus(machine, keep_busy=keep_busy)
    if pick is not None and not 1 <= pick <= len(free):
        raise ClusterError(f"--pick {pick} is not possible: {what_is_there(machine, free)}.")
    sentence = None if pair is None else pair_sentence(machine, *ends_of(machine, pair))
    has_choice = bool(free) and (pick is not None or as_json or svg is not None)
    choice = pick_devices(machine, pick or len(free), free) if has_choice else None
    if svg is not None:
        _write(draw_topology(machine, choice.ring.devices if choice else ()), svg)
    if as_json:
        mapping = topology_mapping(machine, choice)
        print(json.dumps(mapping if sentence is None else {**mapping, "pair": sentence}))
        return
    if sentence is not None:
        print(sentence)
    else:
        _show(machine, choice if pick is not None else None)
    if svg is not None and pick is None:  # after a choice, the last line is the one to copy
        print(svg)


def _read(source: str | None) -> Cluster:
    if source is None:
        return detect()
    if source == "-":
        # Two line ends make it a text to the reader, which takes a single line for a path.
        return read_topology(sys.stdin.buffer.read().decode("utf-8-sig", errors="replace") + "\n\n")
    return read_topology(Path(source))


def choose_node(cluster: Cluster, hostname: str | None) -> Node:
    """The node of that name, or the first. Raises `ClusterError` where there is none."""
    if not cluster.nodes:
        raise ClusterError("This cluster has no nodes; write one with paceline probe.")
    if hostname is None:
        first, *others = cluster.nodes
        if not others:
            return first
        names = ", ".join(node.hostname for node in others)
        return dataclasses.replace(
            first, notes=(*first.notes, f"This is the first node; --node shows others: {names}.")
        )
    named = [node for node in cluster.nodes if node.hostname == hostname]
    if not named:
        names = ", ".join(node.hostname for node in cluster.nodes)
        raise ClusterError(f"--node {hostname} is not in this cluster; its nodes are {names}.")
    return named[0]


def with_busy_notes(node: Node, *, keep_busy: bool) -> Node:
    """`node` with a note about each GPU that a choice leaves out because somebody uses it."""
    if keep_busy:
        return node
    notes = [
        f"{device.label} is left out of every choice: {device.busy}; --all takes it all the same."
        for device in node.devices
        if device.busy
    ]
    return dataclasses.replace(node, notes=(*node.notes, *notes))


def free_gpus(node: Node, *, keep_busy: bool) -> list[int]:
    """Indices of the GPUs to choose among, ascending."""
    return sorted(device.index for device in node.devices if device.kind == "cuda" and (keep_busy or not device.busy))


def what_is_there(node: Node, free: Sequence[int]) -> str:
    """ "a-node has 2 free GPUs (0 and 3) and 2 busy ones, which --all takes too", for the sentence of a mistake."""
    where = node.hostname or "this node"
    gpus = [device for device in node.devices if device.kind == "cuda"]
    if not gpus:
        return f"{where} has no GPU, only {node.num_cores} CPU cores" if node.num_cores else f"{where} has no GPU"
    num_busy = len(gpus) - len(free)
    listed = f" ({', '.join(map(str, free))})" if free else ""
    words = f"{where} has {len(free)} {'free ' if num_busy else ''}GPU{'s' * (len(free) != 1)}{listed}"
    return f"{words} and {num_busy} busy, which --all takes too" if num_busy else words


def ends_of(node: Node, pair: str) -> tuple[str, str]:
    """ "0,1" as ("GPU0", "GPU1"); a label or a name of a part, such as NIC1 or mlx5_0, is possible too.

    Raises:
        ClusterError: not two, twice the same, or one that the node does not have.
    """
    known = {device.label: device.label for device in node.devices if device.kind == "cuda"}
    known |= {part.label: part.label for part in node.peripherals}
    by_name = {part.name: part.label for part in node.peripherals} | known
    by_name |= {label.removeprefix("GPU"): label for label in known if label.startswith("GPU")}
    by_name |= {name.lower(): label for name, label in by_name.items()}
    words = [word.strip() for word in pair.split(",")]
    found = [by_name.get(word, by_name.get(word.lower())) for word in words]
    if len(words) != 2 or found[0] == found[1] is not None:
        raise ClusterError(
            f"--pair {pair} should be two different GPUs such as 0,1, or a GPU and a NIC such as 0,NIC1."
        )
    one, other = found
    if one is None or other is None:
        missing = words[0] if one is None else words[1]
        there = f"its parts are {', '.join(known)}" if known else "it has no GPU"
        raise ClusterError(f"--pair {pair}: {node.hostname or 'this node'} has no {missing}; {there}.")
    return one, other


def _show(machine: Node, choice: DeviceChoice | None) -> None:
    from paceline.report.topology import choice_lines, node_view

    console = table_console(pipe_columns=200)  # 16 GPUs and 10 network cards fit
    console.print(node_view(machine, console.width, choice.ring.devices if choice else ()))
    # Whole lines, however narrow the terminal: the last one is there to be copied.
    for line in ["", *choice_lines(choice)] if choice else []:
        console.print(line, soft_wrap=True, markup=False)


def _write(drawing: str, path: Path) -> None:
    try:
        path.write_text(drawing, encoding="utf-8", newline="\n")
    except OSError as problem:
        raise PacelineError(f"The drawing cannot be written to '{path}': {problem.strerror}.") from None
