"""`paceline.doctor`: finds problems of this node, or of several and the network between them, and how to fix them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from paceline import env
from paceline.errors import LaunchError, file_problems, reason_of
from paceline.workflows.arguments import checked

if TYPE_CHECKING:
    from paceline.hardware.checks.engine import Finding
    from paceline.hardware.checks.node_facts import NodeFacts
    from paceline.hardware.checks.reachability import ReachTest


@checked
def doctor(*, hosts: str | None = None, folder: Path | str = Path("runs")) -> tuple[Finding, ...]:
    """Check this node, or all that are named and the network between them.

    Example: `[finding.what for finding in paceline.doctor() if finding.level == "error"]`.

    Args:
        hosts: nodes to look at over SSH, such as "a:8,b:8"; None: this node alone.
        folder: where runs are written.

    Returns:
        What was found, fine or not; each with its level, a sentence, and what to do.

    Raises:
        LaunchError: names of nodes that are invalid, or ssh cannot be started.
    """
    from paceline.hardware.checks.between_nodes import check_nodes
    from paceline.hardware.checks.node_checks import check_node
    from paceline.hardware.checks.survey import survey
    from paceline.launch.ssh import explain_ssh_failure

    names, folder = _names(hosts), Path(folder).absolute()
    if not names:
        return tuple(check_node(own_facts(folder)))
    command = [sys.executable, "-m", "paceline", "doctor"]
    found = survey(names, _start_over_ssh, doctor=command, folder=folder, explain=explain_ssh_failure)
    findings = list(found.problems)
    for host, facts in found.nodes.items():
        findings += [dataclasses.replace(finding, node=host) for finding in check_node(facts)]
    if len(found.nodes) > 1:
        findings += check_nodes(found)
    return tuple(findings)


def own_facts(folder: Path, marker: Path | None = None, hosts: str | None = None) -> NodeFacts:
    """The facts of this node, for the doctor on another one; `marker` is a file that both should see."""
    from paceline.hardware.checks.node_facts import node_facts
    from paceline.network_addresses import addresses

    return node_facts(addresses(), env.socket_interfaces(), folder=folder, marker=marker, peers=_names(hosts))


def listen(address: str, until: TextIO, output: TextIO) -> None:
    """Accept connections on an address until the stream `until` ends; the port is written to `output`."""
    from paceline.hardware.checks.reachability import answer_until

    with file_problems(f"Nothing can listen on {address} here", LaunchError):
        answer_until(until, address, output)


def connect(targets: str) -> list[ReachTest]:
    """Try to connect to "NAME=ADDRESS:PORT,…". Raises `LaunchError` for other texts."""
    from paceline.hardware.checks.reachability import try_to_reach

    doors = []
    for target in targets.split(","):
        name, _, where = target.partition("=")
        address, _, port = where.rpartition(":")
        if not (name and address and port.isdigit()):
            raise LaunchError(f"connect = {target!r} should be NAME=ADDRESS:PORT.")
        doors.append((name, address, int(port)))
    return try_to_reach(doors)


def _names(hosts: str | None) -> list[str]:
    """The names of nodes. Raises `LaunchError` for invalid ones."""
    from paceline.launch.node_list import parse_node_list

    return [node.address for node in parse_node_list(hosts)] if hosts is not None else []


def _start_over_ssh(host: str, program: Sequence[str]) -> subprocess.Popen[str]:
    from paceline.launch.ssh import ssh_argv

    argv = ssh_argv(host, program, cwd=Path.cwd(), environ={})
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
    except OSError as problem:
        raise LaunchError(f"ssh cannot be started: {reason_of(problem)}; install the OpenSSH client.") from None
