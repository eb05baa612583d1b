"""Whether the network interfaces that are named for workers connect all nodes: asked before Gloo connects over them.

Gloo opens one connection between two workers over each interface of `GLOO_SOCKET_IFNAME=a,b`: the first one of each
worker with the first one of the other, the second with the second. Over one that leads nowhere it would wait until its
timeout.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch.distributed import Store  # type: ignore[attr-defined]

from paceline import env
from paceline.comm.links import group_by_node, node_identity
from paceline.comm.store_answers import exchange_answers
from paceline.errors import LaunchError
from paceline.network_addresses import addresses
from paceline.spec.codec import JsonValue

TRY_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class _Reception(JsonValue):
    """Where a worker can be reached, one address and port for each interface."""

    node: str
    hostname: str
    ports: tuple[tuple[str, str, int], ...] = ()
    """Interface, address, port."""
    problem: str = ""


def check_interfaces(names: Sequence[str], store: Store, facts: env.WorkerFacts) -> None:
    """A collective of all workers, each with the names of its own node's interfaces.

    Raises:
        LaunchError: on every worker: an interface that is not there, is down, or does not lead to its counterpart on
            another node; says which, and from where.
    """
    with ExitStack() as open_sockets:
        exchange = partial(exchange_answers, store, rank=facts.rank, world_size=facts.world_size)
        mine = _listen(names, open_sockets)
        texts = exchange("interfaces", json.dumps(mine.to_mapping()))
        everybody = [_Reception.from_mapping(json.loads(text)) for text in texts]
        problem = next((one.problem for one in everybody if one.problem), "")
        leaders = [ranks[0] for ranks in group_by_node([one.node for one in everybody])]
        if not problem and facts.rank in leaders:
            others = [everybody[rank] for rank in leaders if rank != facts.rank]
            with ThreadPoolExecutor(max_workers=16) as pool:
                problem = next(filter(None, pool.map(lambda other: _try_to_reach(other, mine), others)), "")
        problems = exchange("reached", problem)
    if any(problems):
        raise LaunchError(next(filter(None, problems)))


def _listen(names: Sequence[str], open_sockets: ExitStack) -> _Reception:
    hostname = socket.gethostname()
    ports = []
    for name in names:
        try:
            address = addresses(name)[0][1]
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listening = open_sockets.enter_context(socket.create_server((address, 0), family=family, backlog=4096))
        except (LaunchError, OSError) as problem:
            said = f"Workers on {hostname} cannot use the interface {name}: {str(problem).rstrip('.')}"
            return _Reception(node_identity(), hostname, problem=f"{said}; {_advice(names)}")
        ports.append((name, address, listening.getsockname()[1]))
    return _Reception(node_identity(), hostname, tuple(ports))


def _try_to_reach(other: _Reception, mine: _Reception) -> str:
    """Why one of the other node's interfaces is not reached from its counterpart here; empty if all are."""
    names = [name for name, _, _ in mine.ports]
    if len(other.ports) != len(names):
        return (
            f"{mine.hostname} names {len(names)} network interfaces for workers, and {other.hostname} "
            f"{len(other.ports)}; name as many on every node."
        )
    for (name, address, _), (far_name, far_address, port) in zip(mine.ports, other.ports, strict=True):
        try:
            with socket.create_connection((far_address, port), timeout=TRY_TIMEOUT_S) as connection:
                source = connection.getsockname()[0]
        except OSError as problem:
            reason = problem.strerror or str(problem)
        else:
            if source == address:
                continue
            reason = f"the way there begins at {source}, not at {address}"
        return (
            f"{name} of {mine.hostname} does not lead to {far_name} of {other.hostname} ({far_address}): {reason}; "
            f"{_advice(names)}"
        )
    return ""


def _advice(names: Sequence[str]) -> str:
    return f"bring it up and give it a route, or leave it out of {','.join(names)} (interface, GLOO_SOCKET_IFNAME)."
