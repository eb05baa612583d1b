"""A script that does something outside of Paceline's interface, so that N workers learn something else than one or two
runs differ, is shown with its cause; a script that only looks so trains, and learns the same.

"Shown" means: the run on two workers ends with a sentence, or `paceline verify` names the first difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.verify.harmless import HARMLESS
from tests.verify.mistakes import MISTAKES, State
from tests.verify.scripts import Cause, Script, cases_of
from tests.verify.showing import Shown, outcomes, shown_by

_GLOO = "not shown: workers send tensors of different sizes, and Gloo ends a process"
_NOT_COMPARED = "not shown: weights are not compared before the first step, and the verdict names a gradient"
_LATE = "not shown with its cause: it begins after the audit's steps, and the verdict names a gradient"
_ALIKE = "not shown: every worker does it for each virtual shard, and workers learn the same"
NOT_SHOWN = {
    "a_rate_of_a_term_that_rank_0_alone_lowers_late": _LATE,
    "a_backward_pass_in_the_loss_function": _ALIKE,
    "a_layer_frozen_on_one_rank": _GLOO,
    "a_layer_whose_width_follows_from_the_rank": _GLOO,
    "weights_with_a_spread_by_the_number_of_workers": _NOT_COMPARED,
    "weights_drawn_after_a_draw_for_each_worker": _NOT_COMPARED,
}
_SAME_AGAIN = "not shown: a worker that is alone computes the same again, and learns what it learns alone"
NOT_SHOWN_ALONE = {
    "the_first_loss_as_the_unit_of_all": _SAME_AGAIN,
    "a_cache_by_the_number_of_samples": _SAME_AGAIN,
}


def _expected(names: dict[str, type[Script]], not_shown: dict[str, str]) -> list[Any]:
    """Each name as a parameter, marked if today's source does not show the mistake."""
    marks = {name: pytest.mark.xfail(raises=AssertionError, strict=True, reason=why) for name, why in not_shown.items()}
    return [pytest.param(name, marks=marks[name]) if name in marks else name for name in names]


@pytest.mark.parametrize("mistake", _expected(MISTAKES, NOT_SHOWN))
def test_a_mistake_is_shown_with_its_cause(mistake: str, tmp_path: Path) -> None:
    kind = MISTAKES[mistake]
    shown = shown_by(kind, mistake, tmp_path)
    assert kind.cause in shown.causes, shown.sentence or "nothing was shown"


@pytest.mark.parametrize("mistake", _expected(cases_of(State), NOT_SHOWN_ALONE))
def test_state_between_calls_is_shown_to_a_worker_that_is_alone(mistake: str, tmp_path: Path) -> None:
    (alone,) = outcomes(State, mistake, 1, tmp_path)
    assert Cause.STATE in Shown(alone.error).causes, alone


@pytest.mark.parametrize("case", HARMLESS)
def test_a_harmless_script_learns_the_same_on_two_workers_as_on_one(case: str, tmp_path: Path) -> None:
    shown = shown_by(HARMLESS[case], case, tmp_path)
    assert not shown.sentence
    expected, *others = shown.weights
    for weights in others:
        for name, value in expected.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
