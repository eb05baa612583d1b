"""`paceline topo`: the links inside of a node, and which of its devices to use."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from paceline.cli.console import table_console
from paceline.cli.options import OPTIONS, OnlyJson, naming_options, options_of
from paceline.workflows import topo as workflow
from paceline.workflows.topo import Topology


@options_of(
    workflow.topo,
    source={"help": "Read nvidia-smi topo -m or cluster.json; - is standard input."},
    pair={"metavar": "0,1"},
    node={"help": "The name of the node, in a cluster.json with several (default: the first)."},
    pick={
        "help": "Choose this many GPUs, so that the slowest link of a ring through them is as fast as possible; "
        "without it, none are chosen."
    },
)
def topo(as_json: OnlyJson = False, **options: Any) -> None:
    """Show how the GPUs of a node are connected, and choose the best K of them."""
    source = options.pop("source", None)
    if source == "-":
        # Two line ends make it a text to the reader, which takes a single line for a path.
        source = sys.stdin.buffer.read().decode("utf-8-sig", errors="replace") + "\n\n"
    elif source is not None:
        source = Path(source)
    found = _naming_options(workflow.topo(source, **options))
    if as_json:
        from paceline.report.topology import topology_mapping

        mapping = topology_mapping(found.node, found.choice)
        print(json.dumps(mapping if found.pair_sentence is None else {**mapping, "pair": found.pair_sentence}))
        return
    if found.pair_sentence is not None:
        print(found.pair_sentence)
    else:
        _show(found, has_pick="pick" in options)
    if "svg" in options and "pick" not in options:  # after a choice, the last line is the one to copy
        print(options["svg"])


def _naming_options(found: Topology) -> Topology:
    """The same with notes that name the options of this command in place of the function's parameters."""
    names = {"node": "--node", "keep_busy": OPTIONS["keep_busy"]["names"][0]}
    notes = tuple(naming_options(note, names) for note in found.node.notes)
    return dataclasses.replace(found, node=dataclasses.replace(found.node, notes=notes))


def _show(found: Topology, *, has_pick: bool) -> None:
    from paceline.report.topology import choice_lines, node_view

    choice = found.choice if has_pick else None
    console = table_console(pipe_columns=200)  # 16 GPUs and 10 network cards fit
    console.print(node_view(found.node, console.width, choice.ring.devices if choice else ()))
    # Whole lines, however narrow the terminal: the last one is there to be copied.
    for line in ["", *choice_lines(choice)] if choice else []:
        console.print(line, soft_wrap=True)
