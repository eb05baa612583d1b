"""The structure of every measuring program: a worker reads a request, measures, and writes a result.

    python -m paceline.measure.NAME REQUEST.json OUT [--quiet]

One process a worker, whether `paceline probe`, torchrun, srun or mpirun starts them. Loads no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from paceline import env
from paceline.spec.codec import JsonValue

Q = TypeVar("Q", bound=JsonValue)

Report = Callable[[str, float], None]
"""Receives a description of the current work, and the completed fraction."""


def unreported(_doing: str, _done: float) -> None:
    """A `Report` that discards its input."""


def run_program(
    doc: str | None, request_type: type[Q], measure: Callable[[Q, Report], JsonValue | None], result_file: str
) -> None:
    """Parse the command line, measure, and write the result to OUT/`result_file`.

    Args:
        doc: what --help says.
        measure: called on every worker; its result, or None on workers that leave none.
        result_file: "{rank}" in it is replaced by the worker's rank.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m paceline.measure.{Path(sys.argv[0]).stem}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("request", type=Path, help="JSON file with what to measure")
    parser.add_argument("out", type=Path, help=f"folder for {result_file}")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    arguments = parser.parse_args()
    request = request_type.load(arguments.request)
    rank = env.worker_facts().rank
    with progress_bar(is_shown=rank == 0 and not arguments.quiet) as report:
        result = measure(request, report)
    if result is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        result.save(arguments.out / result_file.format(rank=rank))


@contextmanager
def progress_bar(*, is_shown: bool) -> Iterator[Report]:
    """A bar on a terminal for work of known size; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)) as shown:
        task = shown.add_task("", total=1.0)
        yield lambda doing, done: shown.update(task, description=doing, completed=done)
