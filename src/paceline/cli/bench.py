"""`paceline bench`: side-by-side measurements on this hardware."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer

from paceline import env
from paceline.cli.console import table_console
from paceline.cli.options import AsJson, Quiet
from paceline.errors import JobError, PacelineError
from paceline.plan import spread
from paceline.spec import Cluster, Job, Plan
from paceline.spec.algorithm import algorithm_names
from paceline.spec.checkpoint_timing import CheckpointRequest, CheckpointTimings
from paceline.spec.comm_timing import (
    TIMINGS_FILE,
    CommCase,
    CommRequest,
    CommTimings,
    WireName,
    message_sizes,
)
from paceline.workflows.allocation import ANYWHERE, Allocation, Where, open_allocation, says_where
from paceline.workflows.run_folder import new_run_dir

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Side-by-side measurements on this hardware.")

REQUEST_FILE = "request.json"

Name = TypeVar("Name", bound=str)


@app.callback()
def bench() -> None:
    """Side-by-side measurements on this hardware."""  # and it keeps a single command from becoming the program


@app.command()
@says_where
def comm(
    workers: Annotated[int | None, typer.Option("--workers", "-n", min=1, help="Workers; all devices.")] = None,
    algorithms: Annotated[str, typer.Option(metavar="NAMES", help="Such as all_reduce,ring; all of them.")] = "all",
    wires: Annotated[str, typer.Option(metavar="NAMES", help="float32, bfloat16, float16, int8, or all.")] = "float32",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Of what is summed: float32, bfloat16, …")] = "float32",
    min_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Smallest message.")] = "4K",
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest message; K, M, G are powers of 1024.")
    ] = "256M",
    servers: Annotated[int, typer.Option(min=1, help="Workers that also serve, with parameter servers.")] = 1,
    link_rate: Annotated[
        float | None, typer.Option(metavar="BYTES/S", help="Of one link in one direction, such as 25e9.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Most rounds of a size; long calls get fewer.")] = 20,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="For all timings; the rest is left out.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; a new one under runs/.")] = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="TIMINGS", help="Measure nothing: table and page of a timings.json.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    where: Where = ANYWHERE,
) -> None:
    """Time every way to sum over all workers, by message size: latency, bandwidth, share of the link."""
    # It needs a template engine and a plotting library: not for `paceline --help`.
    from paceline.report.comm_files import load_timings

    if draw is not None:
        _show(load_timings(draw), out or (draw if draw.is_dir() else draw.parent), as_json)
        return
    request = CommRequest.from_mapping(
        {
            "cases": [
                CommCase(algorithm, wire)
                for wire in _names("--wires", wires, get_args(WireName))
                for algorithm in _names("--algorithms", algorithms, algorithm_names())
            ],
            "sizes_bytes": _sizes(min_bytes, max_bytes),
            "dtype": dtype,
            "num_servers": servers,
            "num_rounds": rounds,
            "budget_s": budget,
            "link_rate_bytes_per_s": link_rate,
        }
    )
    folder = new_run_dir(out, Job(name="bench-comm"))
    if (folder / TIMINGS_FILE).exists():
        raise PacelineError(f"{folder} already holds a benchmark; choose another --out or remove the folder.")
    with open_allocation(where, folder) as site:
        _measure(request, site, _plan(site.cluster, workers), folder, quiet)
    _show(load_timings(folder), folder, as_json)


@app.command()
@says_where
def checkpoint(
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir", metavar="DIR", help="Where to save: a folder, or s3://bucket/place; the results' folder."
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-n", min=1, help="Workers; all devices.")] = None,
    parameters: Annotated[float, typer.Option(min=1, help="Of the model; a checkpoint has 12 bytes each.")] = 100e6,
    rounds: Annotated[int, typer.Option(min=1, help="Checkpoints after the first.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; a new one under runs/.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    where: Where = ANYWHERE,
) -> None:
    """Time checkpoints on this storage: how long training stalls, and how long until one is complete."""
    from paceline.report.checkpoint_bench import checkpoint_mapping, checkpoint_table

    folder = new_run_dir(out, Job(name="bench-checkpoint"))
    if (folder / TIMINGS_FILE).exists():
        raise PacelineError(f"{folder} already holds a benchmark; choose another --out or remove the folder.")
    # A name of its own: whatever lies there already is left alone.
    place = directory or str(folder.absolute())
    address = f"{place if '://' in place else Path(place).absolute()}/bench-{uuid.uuid4().hex[:8]}"
    with open_allocation(where, folder) as site:
        plan = _plan(site.cluster, workers)
        request = CheckpointRequest(address, int(parameters), rounds, plan.device_kind)
        _save_request(request, folder)
        _run("paceline.measure.checkpoint_bench", site, plan, folder, quiet)
    timings = CheckpointTimings.from_mapping(json.loads((folder / TIMINGS_FILE).read_text(encoding="utf-8")))
    if as_json:
        print(json.dumps(checkpoint_mapping(timings)))
        return
    table_console(pipe_columns=100).print(checkpoint_table(timings))
    print(folder / TIMINGS_FILE)


def _plan(cluster: Cluster, workers: int | None) -> Plan:
    """One worker a device; on CPU two at least, since one has nobody to sum with."""
    return spread(cluster, workers or max(len(cluster.devices), 2 if cluster.device_kind == "cpu" else 1))


def _measure(request: CommRequest, site: Allocation, plan: Plan, folder: Path, quiet: bool) -> None:
    """Let the workers of `plan` time what is asked for; they leave it in the folder."""
    # Bytes are counted on an interface that every node has under one name; only the user can say that.
    counted = site.where.interface if len(plan.placements) > 1 else None
    request = dataclasses.replace(request, device_kind=plan.device_kind, interface=counted)
    _save_request(request, folder)
    _run("paceline.measure.collective_bench", site, plan, folder, quiet)


def _save_request(request: CommRequest | CheckpointRequest, folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        request.save(folder / REQUEST_FILE)
    except OSError as problem:
        raise PacelineError(f"The folder {folder} cannot be used: {problem}.") from None


def _run(module: str, site: Allocation, plan: Plan, folder: Path, quiet: bool) -> None:
    """The workers of `plan`: each reads the request in the folder, and the first leaves its timings there."""
    # Absolute: on another node the working directory may be another.
    there = folder.absolute()
    program = ["-m", module, str(there / REQUEST_FILE), str(there)]
    site.run(plan, [*program, *(["--quiet"] if quiet else [])], run_dir=folder, environ=env.terminal())


def _show(timings: CommTimings, folder: Path, as_json: bool) -> None:
    """Page and Markdown into the folder; the table, or the line of JSON, to standard output."""
    from paceline.report.comm_bench import PAGE_FILE, comm_mapping, comm_table
    from paceline.report.comm_files import write_comm_bench

    write_comm_bench(timings, folder)
    if as_json:
        print(json.dumps(comm_mapping(timings)))
        return
    console = table_console(pipe_columns=100)
    console.print(comm_table(timings, console.width))
    print(folder / PAGE_FILE)


def _names(option: str, text: str, known: Sequence[Name]) -> list[Name]:
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


def _sizes(min_bytes: str, max_bytes: str) -> tuple[int, ...]:
    smallest, largest = parse_size(min_bytes, "--min-bytes"), parse_size(max_bytes, "--max-bytes")
    if smallest > largest:
        raise JobError(f"--min-bytes {min_bytes} is more than --max-bytes {max_bytes}; exchange them.")
    return message_sizes(smallest, largest)


def parse_size(text: str, option: str) -> int:
    """ "4K" and "4KiB" are 4096 bytes, "100MB" 100,000,000. Raises `JobError` naming the option."""
    found = re.fullmatch(r"(\d+) ?([KMG]?)(iB|B|)", text.strip(), re.IGNORECASE)
    if found is None:
        raise JobError(f"{option} {text} should be a number of bytes such as 4096, 4K, 16MiB or 100MB.")
    number, prefix, suffix = found.groups()
    base = 1000 if suffix.upper() == "B" else 1024
    return int(number) * int(base ** " KMG".index(prefix.upper() or " "))
