"""A row of layers and its cut into stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ModelError
from paceline.partition import best_cut, split
from paceline.spec.model_cost import LayerCost, Layers


def _row(times: list[float]) -> Layers:
    return tuple(LayerCost(str(place), time_s) for place, time_s in enumerate(times))


def _slowest(stages: tuple[Layers, ...]) -> float:
    return max(sum(layer.time_s for layer in stage) for stage in stages)


@given(st.lists(st.sampled_from([0.0, 0.1, 1.0, 2.5, 7.0]) | st.floats(0, 10), min_size=1, max_size=9), st.data())
def test_the_slowest_stage_is_as_fast_as_trying_every_cut_finds(times: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(times)))
    row = _row(times)
    stages = split(row, best_cut(row, num_stages))
    assert len(stages) == num_stages
    assert all(stages)
    assert sum(stages, ()) == row
    best = min(
        _slowest(tuple(row[start:stop] for start, stop in pairwise((0, *inner, len(row)))))
        for inner in combinations(range(1, len(row)), num_stages - 1)
    )
    assert _slowest(stages) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="2 layers that can begin 2 stages cannot be cut into 3"):
        best_cut(_row([1.0, 1.0]), 3)
