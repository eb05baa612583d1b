"""Rings over some of a graph's vertices: the highest bottleneck first, then the highest sum of weights.

Vertices are 0 … n - 1 and `weights[i][j]` is the symmetric weight of an edge, `NO_EDGE` where there is none. Weights
are whole numbers held in floats, so that sums are exact in whatever order they are taken. A ring visits its vertices
once and returns to the first; it has three vertices at least. `apart[i]` is the set of vertices, as bits, that may not
stand in one ring with i.

The searches are exact: dynamic programming over sets of vertices (Held and Karp 1962, Bellman 1962), each set with its
lowest vertex as the start of its paths.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

NO_EDGE = float("-inf")

Weights = Sequence[Sequence[float]]


def highest_bottleneck(weights: Weights, size: int, apart: Sequence[int]) -> float | None:
    """The largest weight that every edge of some ring of `size` vertices reaches; None where there is no such ring."""

    def is_too_high(level: float) -> bool:
        return next(_ring_sets(without_light_edges(weights, level), size, apart), None) is None

    # What one level allows, every lower one does.
    levels = sorted(_levels(weights))
    num_possible = bisect.bisect_left(levels, True, key=is_too_high)
    return levels[num_possible - 1] if num_possible else None


def without_light_edges(weights: Weights, level: float) -> Weights:
    """The graph of the edges that weigh `level` or more."""
    return [[weight if weight >= level else NO_EDGE for weight in row] for row in weights]


def heaviest_sets(weights: Weights, size: int, apart: Sequence[int], least: float = NO_EDGE) -> list[tuple[int, ...]]:
    """All sets of `size` vertices, each ascending, over which rings of the highest sum of weights exist.

    Args:
        least: The sum of some such ring; the better it is, the less is searched.
    """
    if len(_levels(weights)) < 2:
        return list(_ring_sets(weights, size, apart))
    best = NO_EDGE
    found: list[tuple[int, ...]] = []
    for start, others in _starts(weights, size, apart):
        for members, by_sum in enumerate(_path_sums(weights, start, others, size, apart, least)):
            if by_sum is None or members.bit_count() != size - 1:
                continue
            total, _ = _best_step(weights, start, others, by_sum)
            if total > best:
                best, found = total, []
            if total == best != NO_EDGE:
                found.append((start, *_chosen(others, members)))
    return found


def heaviest_ring(weights: Weights, vertices: Sequence[int], least: float = NO_EDGE) -> tuple[int, ...]:
    """The ring over all of `vertices` with the highest sum of weights; of several the first in the order of tuples.

    It starts at the lowest vertex and goes on to the smaller of its two neighbours.

    Args:
        least: The sum of some ring over them; the better it is, the less is searched.

    Raises:
        ValueError: there is no ring over them.
    """
    start, *others = sorted(vertices)
    table = _path_sums(weights, start, others, len(vertices), [0] * len(weights), least)
    ring, members = [start], len(table) - 1
    # A path of the table is walked from its end: the best one to a vertex is what remains of a ring that goes on there.
    while members:
        total, place = _best_step(weights, ring[-1], others, table[members] or {})
        if total == NO_EDGE:
            raise ValueError(f"no ring over {sorted(vertices)}")
        ring.append(others[place])
        members ^= 1 << place
    return tuple(ring)


def _best_step(weights: Weights, here: int, others: Sequence[int], by_sum: dict[float, int]) -> tuple[float, int]:
    """From `here` to the end of one of the paths: the highest sum with it, and the lowest place among the others."""
    row = weights[here]
    best, best_place = NO_EDGE, len(others)
    for total, ends in by_sum.items():
        for place, vertex in enumerate(others):
            if ends >> place & 1 and (total + row[vertex], -place) > (best, -best_place):
                best, best_place = total + row[vertex], place
    return best, best_place


def _starts(weights: Weights, size: int, apart: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Each vertex that can be the lowest one of a ring, and those above it that can be in that ring."""
    core = _core(weights)
    for place, start in enumerate(core):
        others = [vertex for vertex in core[place + 1 :] if not apart[start] >> vertex & 1]
        if len(others) >= size - 1:
            yield start, others


def _ring_sets(weights: Weights, size: int, apart: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All sets of `size` vertices, each ascending, over which rings exist."""
    for start, others in _starts(weights, size, apart):
        closing = _among(others, _neighbours(weights, start))
        for members, ends in enumerate(_path_ends(weights, start, others, size, apart)):
            if ends & closing and members.bit_count() == size - 1:
                yield (start, *_chosen(others, members))


def _path_ends(weights: Weights, start: int, others: Sequence[int], size: int, apart: Sequence[int]) -> list[int]:
    """For each set of `others`, as bits, where paths from `start` through all of it can end, as bits.

    0 for a set that no path covers, or that is larger than a ring of `size` vertices needs.
    """
    near = {1 << place: _among(others, _neighbours(weights, vertex)) for place, vertex in enumerate(others)}
    barred = {1 << place: _among(others, apart[vertex]) for place, vertex in enumerate(others)}
    table = [0] * (1 << len(others))
    first = _among(others, _neighbours(weights, start))
    for bit in near:
        table[bit] = bit & first
    # A longer path is a larger number, so it is met after all that it can come from.
    for members, ends in enumerate(table):
        if ends and members.bit_count() < size - 1:
            onward = 0
            while ends:
                bit = ends & -ends
                ends ^= bit
                onward |= near[bit]
            onward &= ~members
            while onward:
                bit = onward & -onward
                onward ^= bit
                if not members & barred[bit]:
                    table[members | bit] |= bit
    return table


def _path_sums(
    weights: Weights, start: int, others: Sequence[int], size: int, apart: Sequence[int], least: float
) -> list[dict[float, int] | None]:
    """For each set of `others`, as bits: where paths from `start` through all of it can end, by their highest sum.

    None for a set that no path covers, or that is larger than a ring of `size` vertices needs. Paths that cannot become
    a ring of the sum `least`, even by the heaviest edges, are left out.
    """
    heaviest = max(_levels(weights), default=NO_EDGE)
    near = {1 << place: _by_weight(weights[vertex], others) for place, vertex in enumerate(others)}
    barred = {1 << place: _among(others, apart[vertex]) for place, vertex in enumerate(others)}
    everybody = (1 << len(others)) - 1
    table: list[dict[float, int] | None] = [None] * (1 << len(others))
    for weight, first in _by_weight(weights[start], others):
        for bit in near:
            if first & bit:
                table[bit] = {weight: bit}
    for members, by_sum in enumerate(table):
        if by_sum is None or (length := members.bit_count()) >= size - 1:
            continue
        needed = least - (size - length) * heaviest
        left = everybody ^ members
        onward: dict[float, int] = {}
        for total, ends in by_sum.items():
            while ends and total >= needed:
                end = ends & -ends
                ends ^= end
                for weight, neighbours in near[end]:
                    if fresh := neighbours & left:
                        onward[total + weight] = onward.get(total + weight, 0) | fresh
        for total in sorted(onward, reverse=True):
            reached = onward[total] & left
            left ^= reached
            while reached:
                bit = reached & -reached
                reached ^= bit
                if members & barred[bit]:
                    continue
                # No other set leads to this one with this end, so the sum is final.
                if (longer := table[members | bit]) is None:
                    table[members | bit] = {total: bit}
                else:
                    longer[total] = longer.get(total, 0) | bit
    return table


def _by_weight(row: Sequence[float], others: Sequence[int]) -> list[tuple[float, int]]:
    """The neighbours of a vertex among `others`, as bits, for each weight of its edges."""
    weights = {row[vertex] for vertex in others} - {NO_EDGE}
    return [
        (weight, sum(1 << place for place, vertex in enumerate(others) if row[vertex] == weight)) for weight in weights
    ]


def _levels(weights: Weights) -> set[float]:
    return {weight for row in weights for weight in row if weight != NO_EDGE}


def _core(weights: Weights) -> list[int]:
    """The vertices that are left when those with fewer than two neighbours are taken away, again and again."""
    core, rest = 0, (1 << len(weights)) - 1
    while core != rest:
        core, rest = rest, 0
        for vertex in range(len(weights)):
            if core >> vertex & 1 and (_neighbours(weights, vertex) & core).bit_count() >= 2:
                rest |= 1 << vertex
    return _chosen(range(len(weights)), core)


def _neighbours(weights: Weights, vertex: int) -> int:
    """As bits."""
    return sum(1 << other for other, weight in enumerate(weights[vertex]) if weight != NO_EDGE)


def _among(others: Sequence[int], vertices: int) -> int:
    """A set of vertices, as bits, in the numbering of `others`."""
    return sum(1 << place for place, vertex in enumerate(others) if vertices >> vertex & 1)


def _chosen(others: Sequence[int], members: int) -> list[int]:
    """The vertices that a set of `others`, as bits, stands for."""
    return [vertex for place, vertex in enumerate(others) if members >> place & 1]
