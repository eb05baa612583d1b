"""Which placements are to be measured next."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.calibrate import predict, uninformed
from paceline.plan.model import Layout
from paceline.plan.step_constants import Observation, Placement
from paceline.plan.suggest import suggest

RANGE = [
    Placement(Layout((count,) * nodes), size) for nodes in (1, 2, 3, 4, 8) for count in (1, 4) for size in (16, 64, 256)
]


@given(st.integers(1, 40), st.permutations(RANGE))
@settings(max_examples=15, deadline=None)
def test_two_nodes_never_stand_for_many(budget: int, candidates: list[Placement]) -> None:
    suggested = [suggestion.placement for suggestion in suggest([], candidates, budget)]
    assert len(suggested) == len(set(suggested)) == min(budget, len(RANGE))
    assert suggested[0].layout.num_workers == 1
    nodes = [placement.layout.num_nodes for placement in suggested]
    if 2 in nodes:
        assert max(nodes[: nodes.index(2)]) > 2


def test_a_range_of_two_nodes_is_measured_on_two_nodes() -> None:
    candidates = [placement for placement in RANGE if placement.layout.num_nodes < 3]
    assert any(one.placement.layout.num_nodes == 2 for one in suggest([], candidates, 4))


def test_each_measurement_is_expected_to_help() -> None:
    errors = [suggestion.expected_error for suggestion in suggest([], RANGE, 10)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 2


def test_suggested_rows_beat_as_many_on_one_node() -> None:
    """On steps that the model itself makes: rows of a single node leave more uncertain than those suggested."""
    truth = uninformed(RANGE)
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


def test_two_nodes_may_come_first_once_three_are_known() -> None:
    one = Observation(Placement(Layout((1,)), 64), 0.1)
    many = Observation(Placement(Layout((1, 1, 1)), 64), 0.2)
    pairs = [placement for placement in RANGE if placement.layout.num_nodes == 2]
    candidates = [*pairs, Placement(Layout((1, 1, 1)), 64)]
    assert suggest([one], candidates, 1)[0].placement.layout.num_nodes == 3
    assert suggest([one, many], candidates, 1)[0].placement.layout.num_nodes == 2
