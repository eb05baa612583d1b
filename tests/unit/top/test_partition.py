"""A row of layers is cut into stages whose slowest is as fast as can be, within memory; worker counts of pipelines."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise

import pytest

from paceline.errors import ModelError
from paceline.partition import StageLimits, best_cut, micro_batches_in_flight, split
from paceline.spec.model_cost import LayerCost, Layers


def row_of(draw: random.Random) -> Layers:
    """Up to eight layers, in which times and sizes are often equal or 0."""
    return tuple(
        LayerCost(
            time_s=draw.choice([0.0, 0.1, 1.0, 2.5, 7.0, draw.uniform(0, 10)]),
            parameter_bytes=float(draw.randint(0, 50)),
            activation_bytes=float(draw.randint(0, 50)),
            output_bytes=float(draw.randint(0, 20)),
            may_begin=draw.random() < 0.8,
        )
        for _ in range(draw.randint(1, 8))
    )


def every_cut(row: Layers, num_stages: int) -> list[tuple[Layers, ...]]:
    inner = [place for place in range(1, len(row)) if row[place].may_begin]
    cuts = ((0, *starts, len(row)) for starts in combinations(inner, num_stages - 1))
    return [tuple(row[start:stop] for start, stop in pairwise(cut)) for cut in cuts]


def slowest_s(stages: tuple[Layers, ...]) -> float:
    return max(sum(layer.time_s for layer in stage) for stage in stages)


def held_bytes(stages: tuple[Layers, ...], limits: StageLimits) -> float:
    """The fullest stage: its parameters with what is kept beside them, activations, and messages on their way."""
    held = []
    for place, stage in enumerate(stages):
        own = limits.copies_of_parameters * sum(layer.parameter_bytes for layer in stage)
        own += limits.micro_batches_kept[place] * sum(layer.activation_bytes for layer in stage)
        arriving = stages[place - 1][-1].output_bytes if place else 0.0
        leaving = stage[-1].output_bytes if place < len(stages) - 1 else 0.0
        held.append(own + limits.messages_kept * (arriving + leaving))
    return max(held)


@pytest.mark.parametrize("seed", range(8))
def test_no_other_cut_that_fits_is_faster(seed: int) -> None:
    """A hundred rows of layers, each against every cut there is."""
    draw = random.Random(seed)
    for _ in range(100):
        row, num_stages = row_of(draw), draw.randint(1, 4)
        kept = tuple(float(draw.randint(1, 4)) for _ in range(num_stages))
        limits = StageLimits(draw.choice([100.0, 200.0, 400.0, math.inf]), 3.0, kept, draw.choice([0.0, 4.0]))
        room = limits.memory_bytes
        fitting = [stages for stages in every_cut(row, num_stages) if held_bytes(stages, limits) <= room]
        if not fitting:
            with pytest.raises(ModelError, match=str(num_stages)):
                best_cut(row, num_stages, limits)
            continue
        stages = split(row, best_cut(row, num_stages, limits))
        assert len(stages) == num_stages and all(stages) and sum(stages, ()) == row
        assert all(stage[0].may_begin for stage in stages[1:])
        assert held_bytes(stages, limits) <= room
        assert slowest_s(stages) == pytest.approx(min(map(slowest_s, fitting)), rel=1e-9, abs=1e-12)


def test_of_cuts_that_are_equally_fast_the_one_that_sends_least_is_taken() -> None:
    row = tuple(LayerCost(str(place), 1.0, output_bytes=size) for place, size in enumerate((5.0, 1.0, 5.0, 0.0)))
    long = LayerCost("long", 3.0)
    assert best_cut((*row, long), 2) == (0, 4)


@pytest.mark.parametrize("row", [(LayerCost("", 1.0),) * 2, (LayerCost("", 1.0, may_begin=False),) * 5])
def test_more_stages_than_places_to_begin_are_refused_with_what_to_do(row: Layers) -> None:
    with pytest.raises(ModelError) as caught:
        best_cut(row, 3)
    assert all(word in str(caught.value) for word in (f"{len(row)} layers", "3", "pp"))


@pytest.mark.parametrize(
    ("schedule", "worker", "num_micro_batches", "kept"),
    [
        ("gpipe", 0, 8, 8),
        ("gpipe", 3, 8, 8),
        ("1f1b", 0, 8, 4),  # Narayanan et al. 2021, 2.2.1: min(p - r, m)
        ("1f1b", 3, 8, 1),
        ("1f1b", 0, 2, 2),
        ("zero_bubble", 3, 8, 4),  # Qi et al. 2023, ZB-H1: on every worker what 1F1B's first keeps
    ],
)
def test_micro_batches_in_flight_of_four_workers(
    schedule: str, worker: int, num_micro_batches: int, kept: float
) -> None:
    assert micro_batches_in_flight(4, worker, num_micro_batches, schedule) == kept  # type: ignore[arg-type]
