"""The facts of several nodes at once, and of the connections between them, by whatever starts programs on a node."""

from __future__ import annotations

import json
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import JobError
from paceline.hardware.checks.engine import Finding
from paceline.hardware.checks.node_facts import NodeFacts
from paceline.hardware.checks.reachability import ReachTest
from paceline.spec.codec import from_mapping

Process = subprocess.Popen[str]
StartOn = Callable[[str, Sequence[str]], Process]
"""Starts a program on a node, by its arguments, with text pipes for all three streams; the program has to end when its
standard input does."""
Explain = Callable[[int, str, str], str | None]
"""A sentence on why (exit code, standard error, node) failed, if it knows one."""

FACTS_LIMIT_S = 180.0
"""Looking up every peer of a cluster without a name server takes this long."""
ANSWER_LIMIT_S = 60.0
ONE_ENVIRONMENT = "Use one environment on all nodes: a shared folder, a container, or pip install from one list."


@dataclass(frozen=True)
class Survey:
    """What was found out on all nodes that answered."""

    nodes: dict[str, NodeFacts]
    reaches: tuple[ReachTest, ...]
    marker: str
    """What this node wrote into the run folder for the others to read."""
    problems: tuple[Finding, ...] = ()
    """Nodes that did not answer, and why."""


def survey(
    nodes: Sequence[str],
    start_on: StartOn,
    *,
    doctor: Sequence[str],
    folder: Path,
    explain: Explain = lambda _code, _stderr, _node: None,
) -> Survey:
    """Collect the facts of every node, then let each connect to all others.

    Args:
        nodes: names, as the user calls them.
        doctor: the command line of `paceline doctor` on every node.
        folder: where runs are written; a file is left there for the time of the survey.
    """
    remote = _Remote(start_on, doctor, explain)
    with _marked(folder) as (path, marker):
        options = ["--facts", "--folder", str(folder), *([] if path is None else ["--marker", str(path)])]
        arguments = {node: [*options, "--hosts", ",".join(other for other in nodes if other != node)] for node in nodes}
        answers = remote.answers(arguments, FACTS_LIMIT_S)
    facts: dict[str, NodeFacts] = {}
    for node, answer in answers.items():
        try:
            mapping = json.loads(answer)
            facts[node] = NodeFacts.from_mapping(mapping if isinstance(mapping, dict) else {})
        except (JobError, ValueError):
            what = f"{node} has another version of Paceline."
            remote.problems.append(Finding("error", "same versions", what, ONE_ENVIRONMENT, node))
    return Survey(facts, _connect_all(remote, facts), marker, tuple(remote.problems))


def _connect_all(remote: _Remote, nodes: Mapping[str, NodeFacts]) -> tuple[ReachTest, ...]:
    """A test of every ordered pair of nodes, as far as an interface leads from one to the other."""
    addresses = {node: address for node, facts in nodes.items() if (address := rendezvous_address(facts))}
    with remote.listening(addresses) as ports:
        targets = {node: f"{node}={addresses[node]}:{port}" for node, port in ports.items()}
        arguments = {
            node: ["--connect", ",".join(target for other, target in targets.items() if other != node)]
            for node in nodes
            if set(targets) - {node}
        }
        answers = remote.answers(arguments, ANSWER_LIMIT_S)
    reaches = []
    for node, answer in answers.items():
        with suppress(ValueError):
            reaches += [from_mapping(ReachTest, {**attempt, "source": node}) for attempt in json.loads(answer)]
    return tuple(reaches)


def rendezvous_address(facts: NodeFacts) -> str:
    """The address of a node that faces the others; empty where no interface leads to them."""
    interfaces = (facts.network.interface(name) for name in facts.network.routes.values())
    return next((interface.addresses[0] for interface in interfaces if interface and interface.addresses), "")


@contextmanager
def _marked(folder: Path) -> Iterator[tuple[Path | None, str]]:
    """A file with a random text in `folder`, or in its nearest existing parent."""
    text = secrets.token_hex(16)
    there = next((level for level in (folder, *folder.parents) if level.is_dir()), folder)
    path = there / f".paceline-doctor-{secrets.token_hex(4)}"
    try:
        path.write_text(text)
    except OSError:  # the check of the folder says so
        yield None, text
        return
    try:
        yield path, text
    finally:
        path.unlink(missing_ok=True)


@dataclass
class _Remote:
    """`paceline doctor` on other nodes, and what went wrong with it there."""

    start_on: StartOn
    doctor: Sequence[str]
    explain: Explain
    problems: list[Finding] = field(default_factory=list)

    @contextmanager
    def _running(self, arguments: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Process]]:
        """A program on every node, all at once, which ends with the `with`."""
        running = {node: self.start_on(node, [*self.doctor, *words]) for node, words in arguments.items()}
        try:
            yield running
        finally:
            for process in running.values():
                _end(process)

    def answers(self, arguments: Mapping[str, Sequence[str]], limit_s: float) -> dict[str, str]:
        """The answer of every node that gives one: its last line, after what a shell may say."""
        answers = {}
        with self._running(arguments) as running:
            for node, process in running.items():
                try:
                    answer, complaint = process.communicate(timeout=limit_s)
                except subprocess.TimeoutExpired:
                    self._add_problem(node, f"{node} did not answer within {limit_s:g} s.")
                    continue
                if process.returncode:
                    self._add_problem(node, self._reason(node, process.returncode, complaint))
                else:
                    answers[node] = answer.strip().rpartition("\n")[2]
        return answers

    @contextmanager
    def listening(self, addresses: Mapping[str, str]) -> Iterator[dict[str, int]]:
        """The ports that nodes listen on inside the `with`, without the nodes that cannot."""
        with self._running({node: ["--listen", address] for node, address in addresses.items()}) as running:
            too_late = threading.Timer(ANSWER_LIMIT_S, _kill, (list(running.values()),))
            too_late.start()
            ports = {}
            try:
                for node, process in running.items():
                    assert process.stdout is not None
                    if line := next((line for line in process.stdout if line.startswith("{")), ""):
                        ports[node] = int(json.loads(line)["port"])
                    else:
                        _, complaint = process.communicate()
                        self._add_problem(node, self._reason(node, process.returncode, complaint))
            finally:
                too_late.cancel()
            yield ports

    def _reason(self, node: str, exit_code: int, complaint: str) -> str:
        last = next((line for line in reversed(complaint.splitlines()) if line.strip()), "it did not say why")
        return self.explain(exit_code, complaint, node) or f"{node} did not answer: {last.strip().rstrip('.')}."

    def _add_problem(self, node: str, what: str) -> None:
        self.problems.append(Finding("error", "node", what, f"Try by hand: ssh {node} hostname", node))


def _kill(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()


def _end(process: Process) -> None:
    """Close its input, at which it ends by itself; kill it if it does not."""
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
