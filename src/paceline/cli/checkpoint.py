"""`paceline checkpoint`: what a run has left behind, whether it is sound, and what of it is to stay."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import table_console
from paceline.cli.export import export
from paceline.errors import CheckpointError
from paceline.spec.codec import from_mapping
from paceline.spec.job import CheckpointSpec

if TYPE_CHECKING:
    from paceline.checkpoint.storage import Storage

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at, verify, prune and export checkpoints.")

Place = Annotated[
    str, typer.Argument(metavar="DIR", help="A run folder, a folder of checkpoints, or an address such as s3://…")
]


@app.command("ls")
def list_all(
    place: Place,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON and nothing else.")] = False,
) -> None:
    """List the checkpoints of a run, oldest first; only `verify` reads them."""
    with _checkpoints(place) as (storage, names):
        rows = [_row(storage, name) for name in names]
    if as_json:
        print(json.dumps({"address": storage.address, "checkpoints": rows}))
    else:
        _show(rows)


@app.command()
def verify(place: Place) -> None:
    """Read every byte of every checkpoint; exit code 1 if one is damaged."""
    from paceline.checkpoint import verify_checkpoint
    from paceline.checkpoint.load import is_complete

    any_damaged = False
    with _checkpoints(place) as (storage, names):
        for name in names:
            if not is_complete(storage, name):
                print(f"{name}  unfinished", flush=True)
                continue
            try:
                verify_checkpoint(storage, name)
            except CheckpointError as problem:
                any_damaged = True
                print(f"{name}  damaged: {problem}", flush=True)
            else:
                print(f"{name}  good", flush=True)
    if any_damaged:
        raise typer.Exit(1)


@app.command()
def prune(
    place: Place,
    keep_last: Annotated[int, typer.Option(min=1, metavar="N", help="Keep the last N.")] = CheckpointSpec.keep_last,
    keep_every_hours: Annotated[
        float | None, typer.Option(metavar="H", help="Keep the first one of every H hours too.")
    ] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="METRIC", help="Keep the best by a metric too, such as accuracy.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
) -> None:
    """Remove checkpoints that no rule keeps; what stays is read and found good first, or does not count."""
    from paceline.checkpoint.retention import discard, sort_out

    rules = {"keep_last": keep_last, "keep_every_hours": keep_every_hours, "keep_best": keep_best}
    spec = from_mapping(CheckpointSpec, rules)
    with _checkpoints(place) as (storage, _):
        pruning = sort_out(storage, spec)
        for name, problem in pruning.damaged.items():
            print(f"{name}  is damaged, does not count and is left alone: {problem}")
        for name in pruning.stay:
            print(f"{name}  stays")
        for name in pruning.go:
            if not dry_run:
                discard(storage, name)
            print(f"{name}  {'would be removed' if dry_run else 'is removed'}", flush=True)


app.command("export")(export)


@contextlib.contextmanager
def _checkpoints(place: str) -> Iterator[tuple[Storage, list[str]]]:
    """A place and the checkpoints there, whatever their state, oldest first; or the one that it is.

    Raises:
        CheckpointError: there are none, or the storage fails.
    """
    from paceline.checkpoint.load import list_folders
    from paceline.checkpoint.place import find_place, storage_problems

    with storage_problems(place):
        found = find_place(place)
        names = list_folders(found.storage) if found.name is None else [found.name]
        if not names:
            raise CheckpointError(f"There is no checkpoint in {found.storage.address}.")
        yield found.storage, names


def _row(storage: Storage, name: str) -> dict[str, Any]:
    """What the manifest says of a checkpoint."""
    from paceline.checkpoint.load import is_complete, read_manifest

    if not is_complete(storage, name):
        return {"name": name, "state": "unfinished"}
    try:
        manifest = read_manifest(storage, name)
    except CheckpointError as problem:
        return {"name": name, "state": "damaged", "problem": str(problem)}
    return {
        "name": name,
        "state": "complete",
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "workers": manifest.world_size,
        "bytes": manifest.num_bytes,
        "metrics": manifest.metrics,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    table = Table("checkpoint", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for right in ("step", "saved (UTC)", "workers", "size"):
        table.add_column(right, justify="right", no_wrap=True)
    table.add_column("metrics")
    table.add_column("state")
    for row in rows:
        if row["state"] != "complete":
            table.add_row(row["name"], "", "", "", "", "", ": ".join(filter(None, (row["state"], row.get("problem")))))
            continue
        saved_at = row["saved_at"].replace("T", " ").removesuffix("Z")
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
        table.add_row(
            *(row["name"], f"{row['step']:,}", saved_at, str(row["workers"]), decimal(row["bytes"])),
            *(metrics, row["state"]),
        )
    table_console(pipe_columns=120).print(table)
