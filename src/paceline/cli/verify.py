"""`paceline verify`: proof, on the user's own model, that N workers compute what one does."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import typer

from paceline.cli.options import AsJson, options_of, to_stderr
from paceline.workflows import verify as workflow
from paceline.workflows.jobs import silent

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


@options_of(
    workflow.verify,
    job={"metavar": "JOB|SCRIPT.py"},
    workers={
        "names": ("--workers",),
        "metavar": "COUNTS",
        "default": "1,2,4",
        "help": "The numbers of workers to compare, such as 1,2,4 or 1..4.",
    },
)
def verify(context: typer.Context, as_json: AsJson = False, **options: Any) -> None:
    """Check that N workers compute what one does; name the first tensor that differs, and the likely cause.

    A job with numeric parity is compared in float64, so that rounding cannot hide a difference; a script runs as it
    is, with the arguments that follow.
    """
    verdicts = workflow.verify(arguments=context.args, say=silent if as_json else to_stderr, **options)
    if as_json:
        print(json.dumps([dataclasses.asdict(verdict) for verdict in verdicts]))
    else:
        for verdict in verdicts:
            print(verdict.sentence())
    if not all(verdict.passed for verdict in verdicts):
        raise typer.Exit(1)
