"""Synchronous parameter servers: some of the workers also serve, each a part of the vector."""

from __future__ import annotations

from torch import Tensor

from paceline.comm.links import Links
from paceline.comm.servers import sum_at_servers


def parameter_server(values: Tensor, links: Links) -> None:
    """`links.num_servers` workers serve, spread over the nodes.

    A server moves 2 (n - 1) / S of the vector each way, so one of them is the bottleneck that `all_to_one` has, and
    as many as there are workers share the load evenly.
    """
    sum_at_servers(values, links, workers=links.ring, servers=_spread(links.nodes, links.num_servers))


def _spread(nodes: tuple[tuple[int, ...], ...], num_servers: int) -> tuple[int, ...]:
    """The first `num_servers` ranks, taking one of each node in turn."""
    rounds = max(len(node) for node in nodes)
    turns = [node[turn] for turn in range(rounds) for node in nodes if turn < len(node)]
    return tuple(turns[:num_servers])


def parameter_server_two_level(values: Tensor, links: Links) -> None:
    """Sum a flat vector in place: the workers of a node add up first, its leader alone sends and receives.

    At most one worker a node serves. Over a node's link goes what one worker would send, however many there are.
    """
    links.reduce_in_node(values)
    if links.rank in links.leaders:
        servers = links.leaders[: links.num_servers]
        sum_at_servers(values, links, workers=links.leaders, servers=servers)
    links.broadcast_in_node(values)
