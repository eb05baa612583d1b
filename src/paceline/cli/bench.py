"""`paceline bench`: side-by-side measurements on this hardware."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

import typer

from paceline.cli.console import table_console
from paceline.cli.options import AsJson, options_of, reads
from paceline.errors import JobError, did_you_mean
from paceline.spec.algorithm import algorithm_names
from paceline.spec.comm_timing import TIMINGS_FILE
from paceline.spec.wire import WireName
from paceline.workflows import bench as workflow

app = typer.Typer(no_args_is_help=True, help="Side-by-side measurements on this hardware.")

Name = TypeVar("Name", bound=str)


@app.callback()
def bench() -> None:
    """Side-by-side measurements on this hardware."""  # and it keeps a single command from becoming the program


def parse_names(text: str, option: str, known: Sequence[Name]) -> list[Name]:
    """ "ring,all_reduce" as names among `known`, without repeats; "all" is all of them. Raises `JobError`."""
    if text == "all":
        return list(known)
    named: dict[Name, None] = {}
    for part in text.split(","):
        found = next((name for name in known if name == part.strip()), None)
        if found is None:
            hint = did_you_mean(part.strip(), known, " ({})")
            raise JobError(f"{option} {part.strip()!r} is not possible{hint}; there are {', '.join(known)}.")
        named[found] = None
    return list(named)


@app.command()
@options_of(
    workflow.comm,
    algorithms={
        "metavar": "NAMES",
        "parser": reads(parse_names, "--algorithms", algorithm_names()),
        "help": "The all-reduce algorithms to time, such as all_reduce,ring (default: all of them).",
    },
    wires={
        "metavar": "NAMES",
        "show_default": "float32",
        "parser": reads(parse_names, "--wires", get_args(WireName)),
        "help": "The wire formats, in which values are sent, such as float32,bfloat16; or all.",
    },
    draw={"metavar": "TIMINGS"},
)
def comm(as_json: AsJson = False, **options: Any) -> None:
    """Time all-reduce algorithms by message size: latency, bandwidth, share of the link."""
    draw, out = options.get("draw"), options.pop("out", None)
    smallest, largest = options["min_bytes"], options["max_bytes"]
    if draw is None and smallest > largest:
        raise JobError(f"--min-bytes {smallest} is more than --max-bytes {largest}; exchange them.")
    if draw is not None:
        folder = out or (draw if draw.is_dir() else draw.parent)
    else:
        folder = workflow.results_folder(out, "bench-comm")
    timings = workflow.comm(out=folder, **options)
    from paceline.report.comm_bench import PAGE_FILE, comm_mapping
    from paceline.report.comm_table import comm_table

    if as_json:
        print(json.dumps(comm_mapping(timings)))
        return
    console = table_console(pipe_columns=100)
    console.print(comm_table(timings, console.width))
    print(folder / PAGE_FILE)


@app.command()
@options_of(workflow.checkpoint)
def checkpoint(as_json: AsJson = False, **options: Any) -> None:
    """Time checkpoints on this storage: how long training stalls, and how long until one is complete."""
    folder = workflow.results_folder(options.pop("out", None), "bench-checkpoint")
    timings = workflow.checkpoint(out=folder, **options)
    from paceline.report.checkpoint_bench import checkpoint_mapping, checkpoint_table

    if as_json:
        print(json.dumps(checkpoint_mapping(timings)))
        return
    table_console(pipe_columns=100).print(checkpoint_table(timings))
    print(folder / TIMINGS_FILE)
