"""`paceline doctor`: what is wrong with this machine, or with several, and how to fix it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import table_console
from paceline.cli.options import AsJson
from paceline.words import number_of
from paceline.workflows import doctor as workflow

if TYPE_CHECKING:
    from paceline.hardware.doctor.checks import Finding

WARNINGS_FOUND, ERRORS_FOUND = 1, 2
LEVELS = ("error", "warning", "ok")
_STYLES = {"error": "bold red", "warning": "yellow", "ok": "green"}


def doctor(
    hosts: Annotated[
        str | None, typer.Option(metavar="NODES", help="Look at these nodes over SSH too, and between them: a:8,b:8.")
    ] = None,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where runs are written.")] = Path("runs"),
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Also list what is fine.")] = False,
    as_json: AsJson = False,
    answer: Annotated[bool, typer.Option("--answer", hidden=True, help="Answer a doctor on another node.")] = False,
) -> None:
    """Check this machine and say what to fix: exit code 0 is fine, 2 is an error."""
    if answer:
        workflow.answer(sys.stdin, sys.stdout)
        return
    findings = workflow.doctor(hosts=hosts, folder=folder)
    _show(findings, as_json=as_json, show_all=show_all)
    raise typer.Exit(exit_code(findings, strict=strict))


def exit_code(findings: Sequence[Finding], *, strict: bool) -> int:
    """0: fine; 1: warnings, where they count; 2: errors."""
    levels = {finding.level for finding in findings}
    return ERRORS_FOUND if "error" in levels else WARNINGS_FOUND if strict and "warning" in levels else 0


def _show(findings: Sequence[Finding], *, as_json: bool, show_all: bool) -> None:
    """The table, or one line of JSON: what needs action first, errors before warnings."""
    by_level = {level: [finding for finding in findings if finding.level == level] for level in LEVELS}
    if as_json:
        counts = {f"num_{level}": len(by_level[level]) for level in LEVELS}
        listed = [dataclasses.asdict(finding) for level in LEVELS for finding in by_level[level]]
        print(json.dumps({**counts, "findings": listed}))
        return

    from rich.table import Table
    from rich.text import Text

    shown = [finding for level in LEVELS[: 3 if show_all else 2] for finding in by_level[level]]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in shown:
        body = Text(f"{finding.node}: {finding.what}" if finding.node else finding.what)
        if finding.fix:
            body.append(f"\n→ {finding.fix}", style="cyan")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), body)
    if shown:
        table_console(pipe_columns=100).print(table)
    num_errors, num_warnings, num_ok = (len(by_level[level]) for level in LEVELS)
    print(
        f"{number_of(num_ok, 'check')} passed, {number_of(num_warnings, 'warning')}, {number_of(num_errors, 'error')}."
    )
