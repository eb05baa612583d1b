"""`paceline doctor`: what is wrong with this machine, or with several, and how to mend it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline import env
from paceline.cli.console import table_console
from paceline.cli.options import AsJson
from paceline.errors import LaunchError

if TYPE_CHECKING:
    from paceline.hardware.checks import Finding, NodeFacts

WARNINGS_FOUND, ERRORS_FOUND = 1, 2


def doctor(
    hosts: Annotated[
        str, typer.Option(metavar="NODES", help="Look at these nodes over SSH too, and between them: a:8,b:8.")
    ] = "",
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where runs are written.")] = Path("runs"),
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Also list what is fine.")] = False,
    as_json: AsJson = False,
    facts: Annotated[bool, typer.Option("--facts", hidden=True)] = False,
    marker: Annotated[Path | None, typer.Option(hidden=True)] = None,
    listen: Annotated[str, typer.Option(metavar="ADDRESS", hidden=True)] = "",
    connect: Annotated[str, typer.Option(metavar="NAME=ADDRESS:PORT,…", hidden=True)] = "",
) -> None:
    """Check this machine and say what to fix: exit code 0 is fine, 2 is an error."""
    # What one node is asked by the doctor on another.
    if facts:
        print(json.dumps(_own_facts(folder, marker, _names(hosts)).to_mapping()))
    elif listen:
        _listen(listen)
    elif connect:
        _connect(connect)
    else:
        findings = _examine(hosts, folder.absolute())
        _show(findings, as_json=as_json, show_all=show_all)
        raise typer.Exit(exit_code(findings, strict=strict))


def exit_code(findings: Sequence[Finding], *, strict: bool) -> int:
    """0: fine; 1: warnings, where they count; 2: errors."""
    levels = {finding.level for finding in findings}
    return ERRORS_FOUND if "error" in levels else WARNINGS_FOUND if strict and "warning" in levels else 0


def _names(hosts: str) -> list[str]:
    """What --hosts calls the nodes. Raises `LaunchError` for what cannot be meant."""
    from paceline.launch.hosts import parse_hosts

    return [node.host for node in parse_hosts(hosts)] if hosts else []


def _own_facts(folder: Path, marker: Path | None, peers: Sequence[str]) -> NodeFacts:
    from paceline.hardware.checks import node_facts
    from paceline.network_addresses import addresses

    return node_facts(addresses(), env.socket_interfaces(), folder=folder, marker=marker, peers=peers)


def _examine(hosts: str, folder: Path) -> list[Finding]:
    """Findings of this node, or of all that are named and of what is between them."""
    from paceline.hardware.checks import check_node, check_nodes, survey
    from paceline.launch.ssh import explain_ssh_failure

    names = _names(hosts)
    if not names:
        return check_node(_own_facts(folder, None, []))
    command = [sys.executable, "-m", "paceline", "doctor"]
    found = survey(names, _start_over_ssh, doctor=command, folder=folder, explain=explain_ssh_failure)
    findings = list(found.problems)
    for host, facts in found.nodes.items():
        findings += [dataclasses.replace(finding, node=host) for finding in check_node(facts)]
    if len(found.nodes) > 1:
        findings += check_nodes(found)
    return findings


def _start_over_ssh(host: str, program: Sequence[str]) -> subprocess.Popen[str]:
    from paceline.launch.ssh import ssh_argv

    argv = ssh_argv(host, program, cwd=Path.cwd(), environ={})
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
    except OSError as problem:
        raise LaunchError(f"ssh cannot be started: {problem}; install the OpenSSH client.") from None


def _listen(address: str) -> None:
    from paceline.hardware.checks import answer_until

    try:
        answer_until(sys.stdin, address, sys.stdout)
    except OSError as problem:
        raise LaunchError(f"Nothing can listen on {address} here: {problem.strerror or problem}.") from None


def _connect(text: str) -> None:
    from paceline.hardware.checks import try_to_reach

    doors = []
    for part in text.split(","):
        name, _, where = part.partition("=")
        address, _, port = where.rpartition(":")
        if not (name and address and port.isdigit()):
            raise LaunchError(f"--connect {part!r} should be NAME=ADDRESS:PORT.")
        doors.append((name, address, int(port)))
    print(json.dumps([dataclasses.asdict(reach) for reach in try_to_reach("", doors)]))


def _show(findings: Sequence[Finding], *, as_json: bool, show_all: bool) -> None:
    """The table, or one line of JSON: what needs action first, errors before warnings."""
    order = ("error", "warning", "ok")
    by_level = {level: [finding for finding in findings if finding.level == level] for level in order}
    if as_json:
        counts = {f"num_{level}": len(by_level[level]) for level in order}
        listed = [dataclasses.asdict(finding) for level in order for finding in by_level[level]]
        print(json.dumps({**counts, "findings": listed}))
        return

    from rich.table import Table
    from rich.text import Text

    shown = [finding for level in order[: 3 if show_all else 2] for finding in by_level[level]]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {"error": "bold red", "warning": "yellow", "ok": "green"}
    for finding in shown:
        body = Text(f"{finding.node}: {finding.what}" if finding.node else finding.what)
        if finding.fix:
            body.append(f"\n→ {finding.fix}", style="cyan")
        table.add_row(Text(finding.level, style=styles[finding.level]), body)
    if shown:
        table_console(pipe_columns=100).print(table)
    num_errors, num_warnings, num_ok = (len(by_level[level]) for level in order)
    print(f"{num_ok} check{'s' * (num_ok != 1)} fine, {num_warnings} to look at, {num_errors} to mend.")
