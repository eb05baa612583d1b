"""`paceline checkpoint`: list, verify, prune and export the checkpoints of a run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from paceline.cli.console import table_console
from paceline.cli.options import OnlyJson, options_of, to_stderr
from paceline.workflows import checkpoint as workflow
from paceline.workflows.checkpoint import CheckpointState

app = typer.Typer(no_args_is_help=True, help="Look at, verify, prune and export checkpoints.")


@app.command("ls")
@options_of(workflow.ls)
def ls(as_json: OnlyJson = False, **options: Any) -> None:
    """List the checkpoints of a run, oldest first; only `verify` reads them."""
    found = workflow.ls(**options)
    if as_json:
        print(json.dumps({"address": found.address, "checkpoints": [_mapping(one) for one in found.states]}))
    else:
        _show(found.states)


@app.command("verify")
@options_of(workflow.verify)
def verify(**options: Any) -> None:
    """Read every byte of every checkpoint; exit code 1 if one is damaged."""

    def show(one: CheckpointState) -> None:
        print(f"{one.name}  {': '.join(filter(None, (one.state, one.problem)))}", flush=True)

    if any(one.state == "damaged" for one in workflow.verify(on_each=show, **options)):
        raise typer.Exit(1)


@app.command("prune")
@options_of(workflow.prune)
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    **options: Any,
) -> None:
    """Remove checkpoints that no rule keeps; a rule only counts checkpoints that were read and found good."""
    pruning = workflow.prune(dry_run=dry_run, **options)
    for name, problem in pruning.damaged.items():
        print(f"{name}  is damaged, does not count and is left alone: {problem}")
    for name in pruning.stay:
        print(f"{name}  stays")
    for name in pruning.go:
        print(f"{name}  {'would be removed' if dry_run else 'is removed'}")


@app.command("export")
@options_of(workflow.export)
def export(**options: Any) -> None:
    """Write the model of a checkpoint into one safetensors file, under plain state_dict names."""
    found = workflow.export(say=to_stderr, **options)
    print(f"{options['target']}: the model at step {found.step:,}, from {found.name} in {found.address}")


def _mapping(one: CheckpointState) -> dict[str, Any]:
    """The description of a checkpoint's state."""
    if one.state != "complete":
        return {"name": one.name, "state": one.state, **({"problem": one.problem} if one.problem else {})}
    return {
        "name": one.name,
        "state": one.state,
        "step": one.step,
        "saved_at": one.saved_at,
        "workers": one.workers,
        "bytes": one.num_bytes,
        "metrics": dict(one.metrics),
    }


def _show(states: tuple[CheckpointState, ...]) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    table = Table("checkpoint", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for right in ("step", "saved (UTC)", "workers", "size"):
        table.add_column(right, justify="right", no_wrap=True)
    table.add_column("metrics")
    table.add_column("state")
    for one in states:
        known = [""] * 5
        if one.state == "complete":
            saved_at = one.saved_at.replace("T", " ").removesuffix("Z")
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in one.metrics.items())
            known = [f"{one.step:,}", saved_at, str(one.workers), decimal(one.num_bytes), metrics]
        state = ": ".join(filter(None, (one.state, one.problem)))
        table.add_row(one.name, *known, state)
    table_console(pipe_columns=120).print(table)
