"""Synchronous parameter servers: some of the workers also serve, each a part of the vector, which it receives from all
workers, adds, and sends back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from paceline.comm.links import Links


def all_to_one(values: Tensor, links: Links) -> None:
    """Every worker sends its vector to rank 0, which adds them and sends the sum back: (n - 1) times the whole vector
    each way over its one link, one after the other."""
    sum_at_servers(values, links, workers=links.ring, servers=(0,))


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


def sum_at_servers(values: Tensor, links: Links, *, workers: Sequence[int], servers: Sequence[int]) -> None:
    """Sum `values` in place over `workers`; to be called by each of them, and only by them.

    Every worker sends a server its part of the vector and gets the sum back. A server adds in the order of
    `workers`, itself included, so that the result does not depend on whose message comes first.

    Args:
        servers: those of the workers that own a part, as even as can be. With all workers as servers this is a
            reduce-scatter and an all-gather by direct messages: 2 (n - 1) / n of the vector each way, two rounds.
    """
    for _ in stages_at_servers(values, links, workers=workers, servers=servers):
        pass


def stages_at_servers(
    values: Tensor, links: Links, *, workers: Sequence[int], servers: Sequence[int]
) -> Iterator[None]:
    """The two stages of `sum_at_servers`, in place of a flat vector: yields where each of them has begun to send."""
    rank = links.rank
    parts = dict(zip(servers, values.tensor_split(len(servers)), strict=True))
    others = [worker for worker in workers if worker != rank]
    mine = parts.pop(rank, None)

    arriving = {} if mine is None else {worker: links.message_for(mine) for worker in others}
    transfer = links.exchange({server: links.encode(part) for server, part in parts.items()}, arriving)
    yield
    transfer.wait()
    if mine is not None:
        own = mine.clone()
        mine.zero_()
        for worker in workers:
            mine.add_(own if worker == rank else arriving[worker])

    answers = {server: links.message_for(part) for server, part in parts.items()}
    answer = None if mine is None else links.encode(mine)
    transfer = links.exchange({} if answer is None else dict.fromkeys(others, answer), answers)
    if mine is not None and answer is not None and links.wire is not None:
        mine.copy_(answer)  # what everybody else sees of it
    yield
    transfer.wait()
    for server, message in answers.items():
        parts[server].copy_(message)
