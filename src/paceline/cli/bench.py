"""`paceline bench`: side-by-side measurements on this hardware."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer

from paceline.cli.console import table_console
from paceline.cli.options import AsJson, Quiet, Servers, Workers, grouped, parse_size
from paceline.errors import JobError
from paceline.spec.algorithm import algorithm_names
from paceline.spec.comm_timing import TIMINGS_FILE, WireName
from paceline.workflows import bench as workflow
from paceline.workflows.where import HERE, Where

app = typer.Typer(no_args_is_help=True, help="Side-by-side measurements on this hardware.")

Out = Annotated[Path | None, typer.Option(help="Folder of the results (default: a new one under runs/).")]
Name = TypeVar("Name", bound=str)


@app.callback()
def bench() -> None:
    """Side-by-side measurements on this hardware."""  # and it keeps a single command from becoming the program


@app.command()
@grouped
def comm(
    workers: Workers = None,
    algorithms: Annotated[str, typer.Option(metavar="NAMES", help="Such as all_reduce,ring (default: all).")] = "all",
    wires: Annotated[str, typer.Option(metavar="NAMES", help="float32, bfloat16, float16, int8, or all.")] = "float32",
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="Data type of the values that are summed: float32, bfloat16, …")
    ] = "float32",
    min_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Smallest message.")] = "4K",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest message; K, M, G are powers of 1024.")
    ] = "256M",
    servers: Servers = 1,
    link_rate: Annotated[
        float | None, typer.Option(metavar="BYTES/S", help="Rate of one link in one direction, such as 25e9.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Most rounds of a size; long calls get fewer.")] = 20,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time for all timings; what is left then is left out.")
    ] = 60.0,
    out: Out = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="TIMINGS", help="Measure nothing: table and page of a timings.json.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    where: Where = HERE,
) -> None:
    """Time every way to sum over all workers, by message size: latency, bandwidth, share of the link."""
    smallest, largest = parse_size(min_bytes, "--min-bytes"), parse_size(max_bytes, "--max-bytes")
    if draw is None and smallest > largest:
        raise JobError(f"--min-bytes {min_bytes} is more than --max-bytes {max_bytes}; exchange them.")
    if draw is not None:
        folder = out or (draw if draw.is_dir() else draw.parent)
    else:
        folder = workflow.results_folder(out, "bench-comm")
    timings = workflow.comm(
        workers=workers,
        algorithms=parse_names("--algorithms", algorithms, algorithm_names()),
        wires=parse_names("--wires", wires, get_args(WireName)),
        dtype=dtype,
        min_bytes=smallest,
        max_bytes=largest,
        servers=servers,
        link_rate=link_rate,
        rounds=rounds,
        budget=budget,
        out=folder,
        draw=draw,
        quiet=quiet,
        where=where,
    )
    from paceline.report.comm_bench import PAGE_FILE, comm_mapping
    from paceline.report.comm_table import comm_table

    if as_json:
        print(json.dumps(comm_mapping(timings)))
        return
    console = table_console(pipe_columns=100)
    console.print(comm_table(timings, console.width))
    print(folder / PAGE_FILE)


@app.command()
@grouped
def checkpoint(
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir", metavar="DIR", help="Where to save: a folder, or s3://bucket/place (default: the results' folder)."
        ),
    ] = None,
    workers: Workers = None,
    parameters: Annotated[
        float, typer.Option(min=1, help="Parameters of the model; a checkpoint has 12 bytes for each.")
    ] = 100e6,
    rounds: Annotated[int, typer.Option(min=1, help="Checkpoints after the first.")] = 5,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    where: Where = HERE,
) -> None:
    """Time checkpoints on this storage: how long training stalls, and how long until one is complete."""
    folder = workflow.results_folder(out, "bench-checkpoint")
    timings = workflow.checkpoint(
        directory=directory,
        workers=workers,
        parameters=parameters,
        rounds=rounds,
        out=folder,
        quiet=quiet,
        where=where,
    )
    from paceline.report.checkpoint_bench import checkpoint_mapping, checkpoint_table

    if as_json:
        print(json.dumps(checkpoint_mapping(timings)))
        return
    table_console(pipe_columns=100).print(checkpoint_table(timings))
    print(folder / TIMINGS_FILE)


def parse_names(option: str, text: str, known: Sequence[Name]) -> list[Name]:
    """ "ring,all_reduce" as names among `known`, without repeats; "all" is all of them. Raises `JobError`."""
    if text == "all":
        return list(known)
    named: dict[Name, None] = {}
    for part in text.split(","):
        found = next((name for name in known if name == part.strip()), None)
        if found is None:
            near = difflib.get_close_matches(part.strip(), known, n=1, cutoff=0.5)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise JobError(f"{option} {part.strip()!r} is not possible{hint}; there are {', '.join(known)}.")
        named[found] = None
    return list(named)
