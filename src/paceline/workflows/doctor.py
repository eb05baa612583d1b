"""`paceline.doctor`: finds problems of this node, or of several and the network between them, and how to fix them."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import LaunchError, file_problems
from paceline.workflows.arguments import checked

if TYPE_CHECKING:
    from paceline.hardware.doctor.checks import Finding

ANSWER_LIMIT_S = 180.0
"""Looking up every peer of a cluster without a name server takes this long."""
_ANSWER = "import sys; from paceline.hardware.doctor.node import answer; answer(sys.stdin, sys.stdout)"
Process = subprocess.Popen[str]
StartOn = Callable[[str, Sequence[str]], Process]
"""Starts a program on a node, by its arguments, with text pipes for all three streams; the program has to end when its
standard input does."""


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
    from paceline.hardware.doctor.node import examine
    from paceline.launch.node_list import parse_node_list

    folder = Path(folder).absolute()
    if hosts is None:
        return examine(folder).findings
    return survey([node.address for node in parse_node_list(hosts)], _start_over_ssh, folder)


def survey(nodes: Sequence[str], start_on: StartOn, folder: Path) -> tuple[Finding, ...]:
    """What is wrong on nodes and between them; each of them runs a doctor of its own."""
    from paceline.hardware.doctor.checks import Finding
    from paceline.hardware.doctor.cluster import ONE_ENVIRONMENT, Surveyed, check_nodes
    from paceline.hardware.doctor.node import facts_of

    findings = []
    program = [sys.executable, "-c", _ANSWER]
    with ExitStack() as at_end, ThreadPoolExecutor(len(nodes)) as pool:
        marker = at_end.enter_context(_marker_in(folder))
        asked: dict[str, Process] = {}
        for node in nodes:
            asked[node] = start_on(node, program)
            at_end.callback(_end, asked[node])
        question = {"folder": str(folder), "marker": str(marker)}
        told = pool.map(lambda node: _ask(asked[node], {**question, "peers": [*{*nodes} - {node}]}), nodes)
        found: dict[str, Surveyed] = {}
        doors: dict[str, tuple[str, int]] = {}
        for node, (answer, skew_s) in zip(nodes, told, strict=True):
            try:
                facts = facts_of(answer["facts"])
                found[node] = Surveyed(facts, skew_s, answer["marker"] == marker.name, {})
                doors |= {node: (facts.address, answer["port"])} if facts.address else {}
            except (KeyError, TypeError):
                reason, fix = f"{node} has another version of Paceline.", ONE_ENVIRONMENT
                if not answer:
                    reason, fix = f"{node} did not answer: {_complaint(asked[node])}.", f"Try: ssh {node} hostname"
                findings.append(Finding("error", "node", reason, fix, node))
        others = [{other: doors[other] for other in doors if other != node} for node in found]
        problems = pool.map(lambda node, doors: _ask(asked[node], doors)[0], found, others)
        found = {node: replace(found[node], unreachable=one) for node, one in zip(found, problems, strict=True)}
    for node, one in found.items():
        findings += [replace(finding, node=node) for finding in one.facts.findings]
    return (*findings, *(check_nodes(found, str(folder)) if len(found) > 1 else ()))


def _ask(process: Process, question: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """A node's answer, and the seconds that its clock is ahead if the answer says the time; empty for none."""
    assert process.stdin is not None and process.stdout is not None
    too_late = threading.Timer(ANSWER_LIMIT_S, process.kill)
    too_late.start()
    try:
        print(json.dumps(question), file=process.stdin, flush=True)
        for line in process.stdout:
            if line.startswith("{"):  # a shell may greet before
                answer = json.loads(line)
                return answer, answer.get("time_s", 0.0) - time.time()
    except (OSError, ValueError):
        pass  # it has ended, or says something else
    finally:
        too_late.cancel()
    return {}, 0.0


def _complaint(process: Process) -> str:
    process.kill()
    assert process.stderr is not None
    lines = [line.strip().rstrip(".") for line in process.stderr if line.strip()]
    return lines[-1] if lines else "it did not say why"


def _end(process: Process) -> None:
    """End a doctor on another node: closing its input does, or else a signal."""
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=5)
    process.kill()
    process.wait()


@contextmanager
def _marker_in(folder: Path) -> Iterator[Path]:
    """A file that holds its own random name, in `folder` or in its nearest existing parent; absent where none can be
    written there, which the check of the folder says."""
    there = next(level for level in (folder, *folder.parents) if level.is_dir())
    path = there / f".paceline-doctor-{secrets.token_hex(16)}"
    try:
        with suppress(OSError):
            path.write_text(path.name)
        yield path
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _start_over_ssh(host: str, program: Sequence[str]) -> Process:
    from paceline.launch.command_lines import ssh_argv

    argv, pipe = ssh_argv(host, program, cwd=Path.cwd(), environ={}), subprocess.PIPE
    with file_problems("ssh cannot be started", LaunchError, "install the OpenSSH client"):
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
