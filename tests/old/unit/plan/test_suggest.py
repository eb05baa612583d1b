"""Which placements are to be measured next."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.calibrate import from_priors, predict
from paceline.plan.model import Layout
from paceline.plan.step_constants import Observation, Placement
from paceline.plan.suggest import suggest

RANGE = [
    Placement(Layout((count,) * nodes), size) for nodes in (1, 2, 3, 4, 8) for count in (1, 4) for size in (16, 64, 256)
]


@given(st.integers(1, 40), st.permutations(RANGE))
@settings(max_examples=10, deadline=None)
def test_each_is_suggested_once_and_the_smallest_first(budget: int, candidates: list[Placement]) -> None:
    suggested = [suggestion.placement for suggestion in suggest([], candidates, budget)]
    assert len(suggested) == len(set(suggested)) == min(budget, len(RANGE))
    assert suggested[0].layout.num_workers == 1


def test_a_cheap_row_is_preferred_to_the_largest() -> None:
    """Of one micro-batch on 1 to 64 nodes of eight, where all that is unknown is the network."""
    known = [
        Observation(Placement(Layout((count,)), 64), seconds) for count, seconds in ((1, 0.3), (4, 0.31), (8, 0.32))
    ]
    candidates = [Placement(Layout((8,) * nodes), 64) for nodes in (2, 4, 8, 16, 32, 64)]
    (first,) = suggest(known, candidates, 1)
    assert first.placement.layout.num_nodes < 16
    assert first.device_seconds > 8 * first.placement.layout.num_nodes * 60


def test_each_measurement_is_expected_to_help() -> None:
    errors = [suggestion.promised_error for suggestion in suggest([], RANGE, 10)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 2


def test_suggested_rows_beat_as_many_on_one_node() -> None:
    """On steps that the model itself makes: rows of a single node leave more uncertain than those suggested."""
    truth = from_priors(RANGE)
    time_of = {placement: forecast.total_s for placement, forecast in zip(RANGE, predict(truth, RANGE), strict=True)}

    def uncertainty(chosen: list[Placement]) -> float:
        from paceline.plan.calibrate import fit

        forecasts = predict(fit([Observation(placement, time_of[placement]) for placement in chosen]), RANGE)
        return float(np.mean([np.log(forecast.high_s / forecast.low_s) for forecast in forecasts]))

    suggested = [suggestion.placement for suggestion in suggest([], RANGE, 6)]
    on_one_node = [placement for placement in RANGE if placement.layout.num_nodes == 1][:6]
    assert uncertainty(suggested) < 0.6 * uncertainty(on_one_node)


def test_nothing_to_choose_from() -> None:
    assert suggest([], [], 3) == []
