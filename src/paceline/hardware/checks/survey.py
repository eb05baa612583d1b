"""Facts of several nodes at once, and of the ways between them, through whatever starts a program on a node."""

from __future__ import annotations

import json
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import JobError
from paceline.hardware.checks.engine import Finding
from paceline.hardware.checks.node_facts import NodeFacts
from paceline.hardware.checks.reachability import ReachTest
from paceline.spec.codec import from_mapping

StartOn = Callable[[str, Sequence[str]], "subprocess.Popen[str]"]
"""Starts a program on a host, by its arguments, with text pipes for all three streams; the program has to end when its
standard input does."""
Explain = Callable[[int, str, str], str | None]
"""A sentence on why (exit code, standard error, host) failed, if it knows one."""

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
    problems: tuple[Finding, ...] = ()
    """Nodes that did not answer, and why."""


def survey(
    hosts: Sequence[str],
    start_on: StartOn,
    *,
    doctor: Sequence[str],
    folder: Path,
    explain: Explain = lambda _code, _stderr, _host: None,
) -> Survey:
    """Ask every host for its facts, then let each knock at all others.

    Args:
        hosts: as the user calls them.
        doctor: the command line of `paceline doctor` on every host.
        folder: where runs are written; a mark is left there for the time of the survey.
    """
    ask = _Asking(start_on, tuple(doctor), explain)
    with _marked(folder) as (path, marker):
        options = [] if path is None else ["--marker", str(path)]
        questions = {
            host: ["--facts", "--folder", str(folder), *options, "--hosts", ",".join(h for h in hosts if h != host)]
            for host in hosts
        }
        answers = ask.all(questions, FACTS_LIMIT_S)
    nodes: dict[str, NodeFacts] = {}
    for host, answer in answers.items():
        try:
            mapping = json.loads(answer)
            nodes[host] = NodeFacts.from_mapping(mapping if isinstance(mapping, dict) else {})
        except (JobError, ValueError):
            ask.problems.append(
                Finding("error", "same versions", f"{host} has another version of Paceline.", ONE_ENVIRONMENT, host)
            )
    reaches = _knock(ask, nodes)
    return Survey(nodes, reaches, marker, tuple(ask.problems))


def _knock(ask: _Asking, nodes: Mapping[str, NodeFacts]) -> tuple[ReachTest, ...]:
    """Every ordered pair of nodes, as far as they have a way to each other."""
    addresses = {host: address for host, facts in nodes.items() if (address := rendezvous_address(facts))}
    with ask.listening(addresses) as ports:
        doors = {host: f"{addresses[host]}:{port}" for host, port in ports.items()}
        questions = {
            host: ["--connect", ",".join(f"{other}={door}" for other, door in doors.items() if other != host)]
            for host in nodes
            if set(doors) - {host}
        }
        answers = ask.all(questions, ANSWER_LIMIT_S)
    reaches = []
    for host, answer in answers.items():
        with suppress(ValueError):
            reaches += [from_mapping(ReachTest, {**attempt, "source": host}) for attempt in json.loads(answer)]
    return tuple(reaches)


def rendezvous_address(facts: NodeFacts) -> str:
    """The address of a node that faces the others; empty where no interface leads to them."""
    for name in facts.network.routes.values():
        interface = facts.network.interface(name)
        if interface is not None and interface.addresses:
            return interface.addresses[0]
    return ""


@contextmanager
def _marked(folder: Path) -> Iterator[tuple[Path | None, str]]:
    """A file with a text that nobody can guess in `folder`, or in the nearest folder above it that is there."""
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


class _Asking:
    """Programs on hosts, and what went wrong with them; none outlives its question."""

    def __init__(self, start_on: StartOn, doctor: tuple[str, ...], explain: Explain) -> None:
        self._start_on = start_on
        self._doctor = doctor
        self._explain = explain
        self.problems: list[Finding] = []

    def all(self, questions: Mapping[str, Sequence[str]], limit_s: float) -> dict[str, str]:
        """The answer of every host that gives one, all asked at once: its last line, after what a shell may say."""
        running = {host: self._start_on(host, [*self._doctor, *words]) for host, words in questions.items()}
        answers = {}
        try:
            for host, process in running.items():
                try:
                    answer, complaint = process.communicate(timeout=limit_s)
                except subprocess.TimeoutExpired:
                    self._complain(host, f"{host} did not answer within {limit_s:g} s.")
                    continue
                if process.returncode:
                    self._complain(host, self._reason(host, process.returncode, complaint))
                else:
                    answers[host] = answer.strip().rpartition("\n")[2]
        finally:
            for process in running.values():
                _end(process)
        return answers

    @contextmanager
    def listening(self, addresses: Mapping[str, str]) -> Iterator[dict[str, int]]:
        """Doors of hosts at their addresses, open inside: their ports, without those that could not be opened."""
        running = {h: self._start_on(h, [*self._doctor, "--listen", address]) for h, address in addresses.items()}

        def give_up() -> None:
            for process in running.values():
                process.kill()

        too_late = threading.Timer(ANSWER_LIMIT_S, give_up)
        too_late.start()
        try:
            ports = {}
            for host, process in running.items():
                assert process.stdout is not None
                if line := next((line for line in process.stdout if line.startswith("{")), ""):
                    ports[host] = int(json.loads(line)["port"])
                else:
                    _, complaint = process.communicate()
                    self._complain(host, self._reason(host, process.returncode, complaint))
            too_late.cancel()
            yield ports
        finally:
            too_late.cancel()
            for process in running.values():
                _end(process)

    def _reason(self, host: str, exit_code: int, complaint: str) -> str:
        last = next((line for line in reversed(complaint.splitlines()) if line.strip()), "it did not say why")
        return self._explain(exit_code, complaint, host) or f"{host} did not answer: {last.strip().rstrip('.')}."

    def _complain(self, host: str, what: str) -> None:
        self.problems.append(Finding("error", "node", what, f"Try by hand: ssh {host} hostname", host))


def _end(process: subprocess.Popen[str]) -> None:
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
