"""`paceline new`: write a starter."""

from __future__ import annotations

import sys
from typing import Annotated, Any, get_args

import typer

from paceline.cli.options import options_of
from paceline.errors import JobError
from paceline.workflows import new as workflow
from paceline.workflows.new import StarterName


@options_of(workflow.new, out={"metavar": "FILE", "help": "The file to write (default: train.toml or train.py)."})
def new(
    kind: Annotated[
        StarterName | None, typer.Argument(help="images, text, tensors or transformers (default: ask in a terminal).")
    ] = None,
    data: Annotated[str | None, typer.Argument(help="The folder or file to train on (default: ask).")] = None,
    **options: Any,
) -> None:
    """Write a job file or a script to begin your own training from."""
    chosen: Any = kind or _asked(f"What do you train on? ({', '.join(get_args(StarterName))})", "KIND")
    path = workflow.new(chosen, data or _asked("Where is it? (a folder or file)", "DATA"), **options)
    command = f"paceline train {path}" if path.suffix == ".toml" else f"paceline launch -n 2 {path}"
    print(f"{path} is written. Next: {command}")


def _asked(question: str, argument: str) -> str:
    if not sys.stdin.isatty():
        raise JobError(
            f"The argument {argument} is missing, and there is no terminal to ask in: paceline new KIND DATA."
        )
    return str(typer.prompt(question))
