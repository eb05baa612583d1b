"""Pipeline stages: where to cut a sequence of layers, and how many micro-batches a stage has in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from paceline.errors import ModelError
from paceline.spec.mesh import ScheduleName


def even_cut(work: Sequence[float], may_begin: Sequence[bool], num_stages: int) -> list[int]:
    """The first layer of every stage, such that stages have about equally much work: each begins with the layer before
    which there is most nearly its part of it; the last one of several, as what an activation and a pooling leave is
    smaller.

    Args:
        work: of each layer, in any unit.
        may_begin: whether a stage may begin with the layer; the first one always does.

    Raises:
        ModelError: there are too few layers.
    """
    places = [place for place, may in enumerate(may_begin) if place and may]
    if len(places) < num_stages - 1:
        raise ModelError(
            f"A model of {len(work)} layers that can begin {len(places) + 1} stages cannot be cut into {num_stages}; "
            "use fewer workers on the axis pp, or fewer stages per worker."
        )
    before = [0.0, *accumulate(work)]
    starts = [0]
    for stage in range(1, num_stages):
        part = before[-1] * stage / num_stages
        possible = [place for place in places if place > starts[-1]]
        possible = possible[: len(possible) - (num_stages - 1 - stage)]  # the others need one each
        starts.append(min(possible, key=lambda place: (abs(before[place] - part), -place)))
    return starts


def micro_batches_in_flight(
    num_workers: int,
    worker: int,
    num_micro_batches: int,
    schedule: ScheduleName = "1f1b",
    stages_per_worker: int = 1,
) -> float:
    """Micro-batches whose activations a worker of a pipeline keeps at once, in all of its layers.

    GPipe: all. 1F1B: min(p - r, m); with v stages, each a v-th of the layers, 2 (p - r - 1) + (v - 1) p + 1 of them
    (Narayanan et al. 2021, 2.2). Zero bubble: on every worker as many as 1F1B's first (Qi et al. 2023, ZB-H1).
    """
    p, m, v = num_workers, num_micro_batches, stages_per_worker
    if schedule == "gpipe":
        return m
    stages_behind = p - 1 if schedule == "zero_bubble" else p - worker - 1
    if v > 1:
        return min(m * v, 2 * stages_behind + (v - 1) * p + 1) / v
    return min(stages_behind + 1, m)


def forward_order(num_workers: int, num_micro_batches: int, stages_per_worker: int) -> list[tuple[int, int]]:
    """(place of a stage among its worker's, micro-batch): groups of num_workers micro-batches, place by place."""
    return [
        (place, micro_batch)
        for start in range(0, num_micro_batches, num_workers)
        for place in range(stages_per_worker)
        for micro_batch in range(start, min(start + num_workers, num_micro_batches))
    ]


@dataclass(frozen=True)
class InFlight:
    """What a worker keeps when backward begins in one of its stages."""

    place: int
    """Which of the worker's stages it is, counted from 0."""
    micro_batches: tuple[float, ...]
    """[place]: micro-batches whose activations the stage keeps, with the one that backward goes through."""


@lru_cache(maxsize=4096)
def in_flight_by_stage(
    num_workers: int, worker: int, num_micro_batches: int, schedule: ScheduleName, stages_per_worker: int
) -> tuple[InFlight, ...]:
    """What a worker keeps of each of its stages, at all the moments of a step where that is most.

    One stage keeps `micro_batches_in_flight`. Several do not keep equally many: the worker is ahead of its backward
    passes by a fixed number of forward passes, which go through its stages in turn, and backward takes them in the
    opposite order.
    """
    most = micro_batches_in_flight(num_workers, worker, num_micro_batches, schedule, stages_per_worker)
    if stages_per_worker == 1:
        return (InFlight(0, (most,)),)
    ahead = round(most * stages_per_worker)
    # After a group of micro-batches everything repeats; the worker is ahead by less than two groups.
    forwards = [p for p, _ in forward_order(num_workers, min(num_micro_batches, 3 * num_workers), stages_per_worker)]
    backwards = [stages_per_worker - 1 - place for place in forwards]
    moves = list(zip(backwards[: num_workers * stages_per_worker], [*forwards[ahead:], *[None] * ahead], strict=False))
    kept = [forwards[:ahead].count(place) for place in range(stages_per_worker)]
    found = []
    for before, move, behind in zip([None, *moves], moves, [*moves[1:], None], strict=False):
        backward, forward = move
        # While moves are alike, one stage keeps ever less and one ever more: together they keep most at either end.
        if before != move or move != behind:
            found.append(InFlight(backward, tuple(kept)))
        kept[backward] -= 1
        if forward is not None:
            kept[forward] += 1
    return tuple(found)


def half_passes_in_flight(
    num_workers: int, worker: int, num_micro_batches: int, schedule: ScheduleName, stages_per_worker: int = 1
) -> float:
    """The most micro-batches of whose backward pass a worker has done only the first half; 0 in most schedules.

    Zero bubble keeps as many micro-batches on every worker as on the first, and forward passes are ahead by as many as
    in 1F1B: the rest is between its halves, with the one at work. Nobody waits for the first stage's first half. With
    several stages on a worker any that is kept may be.
    """
    if schedule != "zero_bubble":
        return 0
    if stages_per_worker > 1:
        return micro_batches_in_flight(num_workers, worker, num_micro_batches, schedule, stages_per_worker)
    return min(worker + 1, num_micro_batches) if worker else 0
