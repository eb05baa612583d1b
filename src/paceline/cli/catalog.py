"""`paceline list`: what a job can say and what the package brings along."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from paceline.cli.console import print_table
from paceline.cli.options import keys_of
from paceline.workflows import catalog
from paceline.workflows.catalog import CatalogEntry
from paceline.workflows.train import train

app = typer.Typer(no_args_is_help=True, help="List recipes, models, data sets, or the keys of a job file.")


@app.command()
def recipes() -> None:
    """List the recipes: jobs that come with the package."""
    _show(catalog.recipes())


@app.command()
def models() -> None:
    """List the reference models and their options."""
    _show(catalog.models())


@app.command()
def data() -> None:
    """List the data sets that a job can name."""
    _show(catalog.data_sets())


@app.command()
def keys(
    prefix: Annotated[str, typer.Argument(help="Only keys that begin with this, such as optim.")] = "",
) -> None:
    """List every key of a job file, then those that only --set takes: values, default and meaning."""
    others = [
        {"key": key, "default": "", "values": "", "meaning": meaning}
        for key, meaning in keys_of(train).items()
        if key.startswith(prefix)
    ]
    of_jobs = [key for key in catalog.job_keys() if key.name.startswith(prefix)] if others else catalog.job_keys(prefix)
    rows = [{"key": key.name, "default": key.default, "values": key.values, "meaning": key.meaning} for key in of_jobs]
    rows += others
    print_table(rows, left=rows[0], pipe_columns=400)


def _show(entries: Iterable[CatalogEntry]) -> None:
    rows = [{"name": entry.name, "description": entry.meaning} for entry in entries]
    print_table(rows, left=rows[0], pipe_columns=400)
