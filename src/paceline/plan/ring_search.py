"""The best ring over some of at most 16 vertices, exactly: the highest bottleneck, then the highest sum of weights.
Of more vertices, where searching all would take too long, a good ring.

Vertices are 0 … n - 1 and `weights[i][j]` is the symmetric weight of an edge, `NO_EDGE` where there is none. Weights
are whole numbers held in floats, so that sums are exact in whatever order they are taken. A ring visits its vertices
once and returns to the first; it has three vertices at least. A set of vertices is an int, one bit for each.

The method is dynamic programming over sets (Held and Karp 1962, Bellman 1962). Paths start at the lowest vertex of
their set, and the best path to each end is made from the best ones through one vertex fewer, for all sets of one size
at once. It runs twice: with the lightest edge as the worth of a path, then, on the edges that reach the highest
bottleneck, with the sum. Whatever the weights, each time takes at most n² 2ⁿ steps, of which 16 vertices leave about 5
million (a tenth of a second), and n 2ⁿ numbers, 8 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_EDGE = float("-inf")
_NUM_CLIMBS = 4
"""Starting points that are improved: those that begin best."""

Weights = NDArray[np.float64]
"""[num_vertices, num_vertices]"""

Sets = NDArray[np.int64]
"""[num_sets], each a set of vertices as bits."""

Paths = NDArray[np.float64]
"""[num_vertices, 2 ** num_vertices]: the worth of the best path that ends at a vertex, from the lowest vertex of a set
through all of it; `NO_EDGE` where there is none."""


def best_ring(
    weights: Sequence[Sequence[float]], size: int, apart: Sequence[int], rank: Callable[[Sequence[int]], Any]
) -> tuple[int, ...] | None:
    """The ring of `size` vertices with the highest bottleneck, of these with the highest sum of weights.

    Of several sets of vertices with such rings it is over the one of the highest `rank`; of several rings over that it
    is the first in the order of tuples, from the lowest vertex towards the smaller of its two neighbours.

    Args:
        apart: [vertex]: the vertices that may not be in one ring with it, as bits.
        rank: What the set of a ring's vertices, ascending, is compared by. No two sets rank the same.

    Returns:
        None where there is no ring.
    """
    edges = np.array(weights)
    by_size = _sets_by_size(len(edges), size, apart)
    bottlenecks = _ring_worths(edges, by_size[-1], _best_paths(edges, by_size, np.minimum), np.minimum)
    bottleneck = bottlenecks.max(initial=NO_EDGE)
    if bottleneck == NO_EDGE:
        return None
    edges[edges < bottleneck] = NO_EDGE
    paths = _best_paths(edges, by_size, np.add)
    sums = _ring_worths(edges, by_size[-1], paths, np.add)
    heaviest = by_size[-1][sums == sums.max()]
    return _first_ring(edges, paths, max(_vertices(heaviest, size), key=rank))


def _sets_by_size(num_vertices: int, size: int, apart: Sequence[int]) -> list[Sets]:
    """The sets of 2 … `size` vertices that can be, or grow to, a ring from the lowest of them upwards."""
    sets = np.arange(1 << num_vertices)
    is_possible = sets & -sets <= 1 << (num_vertices - size)
    num_members = np.zeros_like(sets)
    for vertex in range(num_vertices):
        is_member = sets >> vertex & 1
        num_members += is_member
        is_possible &= (is_member == 0) | (sets & apart[vertex] == 0)
    return [sets[is_possible & (num_members == count)] for count in range(2, size + 1)]


def _best_paths(edges: Weights, by_size: Sequence[Sets], worth: np.ufunc) -> Paths:
    """The best paths through each of the sets.

    Args:
        worth: (worth of a path, weight of an edge) -> worth of the path with that edge more.
    """
    paths = np.full((len(edges), 1 << len(edges)), NO_EDGE)
    for start, end in combinations(range(len(edges)), 2):
        paths[end, 1 << start | 1 << end] = edges[start, end]
    for sets in by_size[:-1]:
        shorter = paths.take(sets, axis=1)
        starts = sets & -sets
        for end in range(len(edges)):
            growing = np.flatnonzero((sets >> end & 1 == 0) & (starts < 1 << end))
            longer = worth(shorter.take(growing, axis=1), edges[:, end, None])
            paths[end, sets[growing] | 1 << end] = longer.max(axis=0)
    return paths


def _ring_worths(edges: Weights, sets: Sets, paths: Paths, worth: np.ufunc) -> NDArray[np.float64]:
    """What the best ring over each of the sets is worth; `NO_EDGE` where there is none. [num_sets]"""
    worths = np.full(len(sets), NO_EDGE)
    for start in range(len(edges)):
        is_start = sets & -sets == 1 << start
        worths[is_start] = worth(paths.take(sets[is_start], axis=1), edges[:, start, None]).max(axis=0)
    return worths


def _first_ring(edges: Weights, sums: Paths, vertices: Sequence[int]) -> tuple[int, ...]:
    """The first one, in the order of tuples, of the rings over `vertices` with the highest sum."""
    ring, left = [vertices[0]], sum(1 << vertex for vertex in vertices)
    # The best path to an end is what remains of a ring that goes on there, so a ring is walked backwards from its end.
    while len(ring) < len(vertices):
        following = int(np.argmax(sums[:, left] + edges[:, ring[-1]]))
        ring.append(following)
        left ^= 1 << following
    return tuple(ring)


def _vertices(sets: Sets, size: int) -> list[list[int]]:
    """[set][member]: the vertices of each set, all of `size` vertices, ascending."""
    places = np.arange(int(sets.max()).bit_length())
    vertices: list[list[int]] = np.nonzero(sets[:, None] >> places & 1)[1].reshape(-1, size).tolist()
    return vertices


# --- many vertices ---


def good_ring(weights: Sequence[Sequence[float]], size: int, rank: Callable[[Sequence[int]], Any]) -> tuple[int, ...]:
    """A ring of `size` vertices with a high `rank`, from its lowest vertex towards the smaller neighbour.

    From each vertex a ring grows by the heaviest edge from its end. The best of these are improved as long as turning a
    part round (2-opt, Croes 1958) or exchanging one vertex for another outside ranks higher. A higher peak may exist.
    """
    grown = sorted((_grow(weights, start, size) for start in range(len(weights))), key=rank, reverse=True)
    best = max((_climb(ring, len(weights), rank) for ring in grown[:_NUM_CLIMBS]), key=rank)
    lowest = best.index(min(best))
    forward = [*best[lowest:], *best[:lowest]]
    return tuple(min(forward, [forward[0], *reversed(forward[1:])]))


def _grow(weights: Sequence[Sequence[float]], start: int, size: int) -> list[int]:
    ring = [start]
    while len(ring) < size:
        left = [vertex for vertex in range(len(weights)) if vertex not in ring]
        # Of equal ones the one that is best joined with all so far, so that groups fill up before the next is entered.
        ring.append(max(left, key=lambda v: (weights[ring[-1]][v], sum(weights[v][other] for other in ring), -v)))
    return ring


def _climb(ring: list[int], num_vertices: int, rank: Callable[[Sequence[int]], Any]) -> list[int]:
    height = rank(ring)
    is_improving = True
    while is_improving:
        is_improving = False
        for changed in _changes(ring, num_vertices):
            if (changed_height := rank(changed)) > height:
                ring, height, is_improving = changed, changed_height, True
                break
    return ring


def _changes(ring: list[int], num_vertices: int) -> Iterator[list[int]]:
    outside = [vertex for vertex in range(num_vertices) if vertex not in ring]
    for place in range(len(ring)):
        for vertex in outside:
            yield [*ring[:place], vertex, *ring[place + 1 :]]
    for first in range(len(ring) - 1):
        for last in range(first + 1, len(ring)):
            yield [*ring[:first], *reversed(ring[first : last + 1]), *ring[last + 1 :]]
