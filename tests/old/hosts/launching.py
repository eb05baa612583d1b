"""Three nodes for a run: the launcher on the first, workers on the other two."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kit.nodes.cluster import Cluster, Node
from tests.kit.nodes.sshd import ssh_between, start_sshd
from tests.old.hosts.stdio import commands_on


@dataclass
class Site:
    """Nodes that trust each other."""

    cluster: Cluster
    keys: Path

    @property
    def launcher(self) -> Node:
        return self.cluster.nodes[0]

    @property
    def workers(self) -> tuple[Node, ...]:
        return self.cluster.nodes[1:]

    def repair(self) -> None:
        for node in self.cluster.nodes:
            if not node.is_up:
                node.boot()
                start_sshd(node, self.keys)
            node.link_up()

    def assert_nobody_left(self, timeout_s: float, *words: str) -> None:
        """No process of Paceline, or with one of these words in its command line, is left on any node."""
        deadline = time.monotonic() + timeout_s
        for node in self.cluster.nodes:
            while node.is_up and (left := [line for line in commands_on(node) if _is_of(line, ("paceline", *words))]):
                assert time.monotonic() < deadline, f"{node.hostname}:\n" + "\n".join(left)


@contextlib.contextmanager
def open_site(keys: Path) -> Iterator[Site]:
    with Cluster(num_nodes=3, rate_bits_per_s=1e9) as cluster, ssh_between(cluster.nodes, keys):
        yield Site(cluster, keys)


def run_on(node: Node, *argv: str) -> None:
    process = node.exec(argv)
    assert process.wait(10) == 0, process.output


def kill_agent(node: Node) -> None:
    run_on(node, "pkill", "-KILL", "-f", "^[^ ]*python[^ ]* -m paceline agent")


def _is_of(command: str, words: tuple[str, ...]) -> bool:
    return any(word in command for word in words)
