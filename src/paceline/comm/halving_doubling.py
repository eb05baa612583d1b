"""Recursive halving and doubling: the fewest rounds at the least traffic."""

from __future__ import annotations

from torch import Tensor

from paceline.comm.links import Links


def halving_doubling(values: Tensor, links: Links) -> None:
    """Reduce-scatter by halving, all-gather by doubling: 2 log2(n) rounds, 2 (n - 1) / n of the vector each way.

    Rabenseifner 2004. The first round exchanges the most, so it pairs neighbours in the ring, the next one workers two
    places apart, and so on: on nodes with a power of two of workers the large exchanges stay inside the node. If the
    number of workers is no power of two, those beyond the largest one in it hand their vector to a partner
    first and get the sum from it at the end.
    """
    order, wire = links.ring, links.wire
    place, size = order.index(links.rank), len(order)
    core = 1 << (size.bit_length() - 1)
    extra = size - core

    if place >= core:
        partner = order[place - core]
        answer = wire.message_for(values)
        links.exchange({partner: wire.encode(values)}, {}).wait()
        links.exchange({}, {partner: answer}).wait()
        wire.decode(answer, values)
        return
    if place < extra:
        message = wire.message_for(values)
        links.exchange({}, {order[place + core]: message}).wait()
        wire.add(message, values)

    _double(_halve(values, place, core, links), place, links)

    if extra:
        answer = wire.encode(values)
        if place < extra:
            links.exchange({order[place + core]: answer}, {}).wait()
        if not wire.is_exact:
            wire.decode(answer, values)  # what the workers beyond see of it


def _halve(values: Tensor, place: int, core: int, links: Links) -> list[tuple[int, Tensor, Tensor]]:
    """Leave in the last segment the sum of what all have there; the rounds as (bit, kept half, given half)."""
    order, wire = links.ring, links.wire
    rounds = []
    segment = values
    bit = 1
    while bit < core:
        lower, upper = segment.tensor_split(2)
        kept, given = (upper, lower) if place & bit else (lower, upper)
        message = wire.message_for(kept)
        partner = order[place ^ bit]
        links.exchange({partner: wire.encode(given)}, {partner: message}).wait()
        wire.add(message, kept)
        rounds.append((bit, kept, given))
        segment = kept
        bit *= 2
    return rounds


def _double(rounds: list[tuple[int, Tensor, Tensor]], place: int, links: Links) -> None:
    """Undo the halving with finished sums: each round both partners learn what the other has."""
    order, wire = links.ring, links.wire
    for bit, kept, given in reversed(rounds):
        partner = order[place ^ bit]
        mine, message = wire.encode(kept), wire.message_for(given)
        links.exchange({partner: mine}, {partner: message}).wait()
        wire.decode(message, given)
        if not wire.is_exact:
            wire.decode(mine, kept)
