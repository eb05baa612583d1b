"""The ring: reduce-scatter, then all-gather, each worker talking to its two neighbours only."""

from __future__ import annotations

from torch import Tensor

from paceline.comm.links import Links


def ring(values: Tensor, links: Links) -> None:
    """2 (n - 1) messages of 1 / n of the vector to the next worker (Patarasuk and Yuan 2009, bandwidth-optimal).

    The ring follows `links.ring`, so of the links between nodes it uses one in each direction. In a lossy wire format
    a partial sum is rounded at each of its n - 1 hops; the whole sum is rounded once and every worker uses what the
    others see.
    """
    order = links.ring
    place, size = order.index(links.rank), len(order)
    following, preceding = order[(place + 1) % size], order[place - 1]
    parts = values.tensor_split(size)

    for hop in range(size - 1):
        leaving, arriving = parts[(place - hop) % size], parts[(place - hop - 1) % size]
        message = links.message_for(arriving)
        links.exchange({following: links.encode(leaving)}, {preceding: message}).wait()
        arriving.add_(message)

    done = parts[(place + 1) % size]
    message = links.encode(done)
    if links.wire is not None:
        done.copy_(message)
    for hop in range(size - 1):
        part = parts[(place - hop) % size]
        arriving_message = links.message_for(part)
        links.exchange({following: message}, {preceding: arriving_message}).wait()
        part.copy_(arriving_message)
        message = arriving_message
