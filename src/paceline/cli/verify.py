"""`paceline verify`: proof, on the user's own model, that N workers compute what one does."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from paceline.cli.options import AsJson, DataDir, Settings, parse_counts, to_stderr
from paceline.workflows import verify as workflow
from paceline.workflows.jobs import silent

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def verify(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB|SCRIPT.py", help="A job, a recipe, or a script of yours.")],
    workers: Annotated[str, typer.Option(help="Numbers of workers to compare.")] = "1,2,4",
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 5,
    data: DataDir = None,
    settings: Settings = None,
    as_json: AsJson = False,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME|MESH", help="How more than one worker divide the model; see paceline train."),
    ] = None,
) -> None:
    """Check that N workers compute what one does; name the first tensor that differs, and the likely cause.

    A job with numeric parity is compared in float64, so that rounding cannot hide a difference; a script runs as it
    is, with the arguments that follow.
    """
    verdicts = workflow.verify(
        job,
        context.args,
        workers=parse_counts(workers, "--workers"),
        steps=steps,
        data=data,
        settings=settings or (),
        strategy=strategy,
        say=silent if as_json else to_stderr,
    )
    if as_json:
        print(json.dumps([dataclasses.asdict(verdict) for verdict in verdicts]))
    else:
        for verdict in verdicts:
            print(verdict.sentence())
    if not all(verdict.passed for verdict in verdicts):
        raise typer.Exit(1)
