"""`paceline topo`: the links inside of a node, and which of its devices to use."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import table_console
from paceline.cli.options import OnlyJson
from paceline.workflows import topo as workflow
from paceline.workflows.topo import Topology


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
        str | None, typer.Option(metavar="NAME", help="The node of a cluster.json with several (default: the first).")
    ] = None,
    pair: Annotated[
        str | None, typer.Option(metavar="0,1", help="Only say how these two are linked; GPU0,NIC1 works as well.")
    ] = None,
    pick: Annotated[
        int | None, typer.Option(metavar="K", help="Choose the K GPUs whose best ring has the fastest slowest link.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the node into an SVG file.")] = None,
    as_json: OnlyJson = False,
    keep_busy: Annotated[bool, typer.Option("--all", help="Choose among busy GPUs too.")] = False,
) -> None:
    """Show how the GPUs of a node are joined, and choose the best K of them."""
    if source == "-":
        # Two line ends make it a text to the reader, which takes a single line for a path.
        text: str | Path = sys.stdin.buffer.read().decode("utf-8-sig", errors="replace") + "\n\n"
    else:
        text = Path(source or "")
    found = workflow.topo(
        text if source is not None else None, node=node, pair=pair, pick=pick, svg=svg, keep_busy=keep_busy
    )
    if as_json:
        from paceline.report.topology import topology_mapping

        mapping = topology_mapping(found.node, found.choice)
        print(json.dumps(mapping if found.pair_sentence is None else {**mapping, "pair": found.pair_sentence}))
        return
    if found.pair_sentence is not None:
        print(found.pair_sentence)
    else:
        _show(found, has_pick=pick is not None)
    if svg is not None and pick is None:  # after a choice, the last line is the one to copy
        print(svg)


def _show(found: Topology, *, has_pick: bool) -> None:
    from paceline.report.topology import choice_lines, node_view

    choice = found.choice if has_pick else None
    console = table_console(pipe_columns=200)  # 16 GPUs and 10 network cards fit
    console.print(node_view(found.node, console.width, choice.ring.devices if choice else ()))
    # Whole lines, however narrow the terminal: the last one is there to be copied.
    for line in ["", *choice_lines(choice)] if choice else []:
        console.print(line, soft_wrap=True, markup=False)
