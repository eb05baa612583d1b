"""`paceline checkpoint`: list, verify, prune and export the checkpoints of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
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
        print(json.dumps({"address": found.address, "checkpoints": [dataclasses.asdict(one) for one in found.states]}))
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


def _show(states: tuple[CheckpointState, ...]) -> None:
    from rich.filesize import decimal

    from paceline.report.tables import grid_of

    def known(text: Callable[[CheckpointState], str]) -> Callable[[CheckpointState], str]:
        return lambda one: text(one) if one.state == "complete" else ""

    columns = [
        ("checkpoint", lambda one: one.name),
        ("step", known(lambda one: f"{one.step:,}")),
        ("saved (UTC)", known(lambda one: one.saved_at.replace("T", " ").removesuffix("Z"))),
        ("workers", known(lambda one: str(one.workers))),
        ("size", known(lambda one: decimal(one.num_bytes))),
        ("metrics", lambda one: ", ".join(f"{name} {value:.4g}" for name, value in one.metrics.items())),
        ("state", lambda one: ": ".join(filter(None, (one.state, one.problem)))),
    ]
    table_console(pipe_columns=120).print(grid_of(columns, states, left=("checkpoint", "metrics", "state")))
