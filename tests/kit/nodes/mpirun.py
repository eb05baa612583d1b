"""Open MPI's mpirun between the nodes of a cluster, which reach each other over SSH (`ssh_between`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from tests.kit.nodes.cluster import INTERFACE


def mpirun_argv(hosts: str, variables: Iterable[str], program: Sequence[str]) -> list[str]:
    """The command that runs `python *program` on nodes.

    Args:
        hosts: how often on which, such as "node0:2,node1:2".
        variables: what workers get of its environment, or NAME=VALUE.
    """
    exported = [word for variable in variables for word in ("-x", variable)]
    network = ["--mca", "oob_tcp_if_include", INTERFACE]
    where = ["--host", hosts, "--bind-to", "none"]
    return ["mpirun", "--allow-run-as-root", *where, *network, *exported, sys.executable, *program]
