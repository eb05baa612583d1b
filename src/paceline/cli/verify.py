"""`paceline verify`: does a job or a training script compute on N workers what it computes on one?"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import typer

from paceline.cli.options import AsJson, options_of, to_stderr
from paceline.workflows import verify as workflow
from paceline.workflows.arguments import silent

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


@options_of(
    workflow.verify,
    job={"metavar": "SCRIPT.py|JOB"},
    workers={
        "names": ("--workers", "-n"),
        "metavar": "COUNTS",
        "default": "1,2",
        "help": "The numbers of workers to compare, such as 1,2,4 or 1..4; 2 is compared with 1.",
    },
)
def verify(context: typer.Context, as_json: AsJson = False, **options: Any) -> None:
    """Check that N workers compute what one does; name what differs first, and the likely cause.

    Any training script of torch, unchanged, with the arguments that follow it: paceline verify --batch 8 -n 2 train.py
    -- --batch-size {batch}. Or a job, which is compared in float64. Ends with 0 if all is equal, 1 if something
    differs, 2 if that could not be told.
    """
    verdicts = workflow.verify(arguments=context.args, say=silent if as_json else to_stderr, **options)
    if as_json:
        for verdict in verdicts:
            print(json.dumps(dataclasses.asdict(verdict)))
    else:
        for verdict in verdicts:
            print(verdict.sentence())
    outcomes = {verdict.outcome for verdict in verdicts}
    if outcomes != {"equal"}:
        raise typer.Exit(1 if "differs" in outcomes else 2)
