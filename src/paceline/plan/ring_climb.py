"""A good ring over some of many vertices, where searching all of them would take too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

_NUM_CLIMBS = 4
"""Starting points that are improved: those that begin best."""


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
