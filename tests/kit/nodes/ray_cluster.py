"""A Ray cluster on the nodes of a cluster: its head on the first.

    with ray_on(cluster.nodes):
        cluster.nodes[0].exec([sys.executable, "program.py"], env=RAY_VARIABLES)

Everything Ray writes lies in /run and /dev/shm of the nodes and goes with them.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tests.kit.nodes.cluster import Node, NodeProcess
from tests.kit.waiting import wait_until

_PORT = 6379
_TIMEOUT_S = 240.0

RAY_VARIABLES = {
    "RAY_ADDRESS": f"node0:{_PORT}",
    "RAY_TMPDIR": "/run/ray",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "a-token-for-one-test",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}
"""What every process needs that has to do with the cluster."""

_COUNT = "import ray; ray.init(address='auto'); print('alive', sum(node['Alive'] for node in ray.nodes()))"


def why_not_ray() -> str | None:
    """Why there can be no Ray here; None where there can."""
    return None if importlib.util.find_spec("ray") else "Ray is not installed (paceline[ray])"


@contextmanager
def ray_on(nodes: Sequence[Node]) -> Iterator[None]:
    """Let all nodes be one Ray cluster until the end."""
    with ExitStack() as daemons:
        for number, node in enumerate(nodes):
            place = ["--head", f"--port={_PORT}", "--include-dashboard=false"] if number == 0 else []
            place += [f"--address={nodes[0].hostname}:{_PORT}"] if number else []
            start = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, f"--node-ip-address={node.address}"]
            start += ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
            daemons.callback(_started(node, start).kill)
        wait_until(lambda: _num_alive(nodes[0]) == len(nodes), "all Ray nodes are alive", _TIMEOUT_S)
        yield


def _started(node: Node, start: Sequence[str]) -> NodeProcess:
    """Ray's daemon on this node. `ray start` gives its daemon 30 s, which nobody can change and which are too few on a
    machine that does much else; so another one is started while there is time."""
    deadline = time.monotonic() + 2 * _TIMEOUT_S
    while True:
        daemon = node.exec(start, env=RAY_VARIABLES)
        try:
            daemon.expect("Ray runtime started", _TIMEOUT_S)
            return daemon
        except BaseException as problem:
            daemon.kill()
            is_slow = isinstance(problem, AssertionError) and "timed out during startup" in daemon.output
            if not is_slow or time.monotonic() > deadline:
                raise


def _num_alive(node: Node) -> int:
    client = node.exec([sys.executable, "-c", _COUNT], env=RAY_VARIABLES)
    client.wait(_TIMEOUT_S)
    return int(client.stdout.partition("alive ")[2] or 0)
