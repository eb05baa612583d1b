"""A script that does something outside of Paceline's interface, so that N workers learn something else than one or two
runs differ, is shown with its cause; a script that only looks so trains, and learns the same.

"Shown" means: the run on two workers ends with a sentence, or `paceline verify` names the first difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.verify.harmless import HARMLESS
from tests.verify.mistakes import MISTAKES, Draws, State
from tests.verify.scripts import Script, cases_of
from tests.verify.showing import outcomes, shown_by

_GLOO = "not shown: workers send tensors of different sizes, and Gloo ends a process"
NOT_SHOWN = {"a_layer_frozen_on_one_rank": _GLOO, "a_layer_whose_width_follows_from_the_rank": _GLOO}
STATES = cases_of(State) | {
    name: kind for name, kind in cases_of(Draws).items() if "generator" in name or "clock" in name
}
"""Ways in which a loss function or a model keeps state from call to call."""
OTHERS = {name: kind for name, kind in MISTAKES.items() if name not in STATES}
_SAME_AGAIN = "not shown: a worker that is alone computes the same again, and learns what it learns alone"
NOT_SHOWN_ALONE = {"the_first_loss_as_the_unit_of_all": _SAME_AGAIN, "a_cache_by_the_number_of_samples": _SAME_AGAIN}


def _expected(names: Mapping[str, type[Script]], not_shown: dict[str, str]) -> list[Any]:
    """Each name as a parameter, marked if today's source does not show the mistake."""
    marks = {name: pytest.mark.xfail(raises=AssertionError, strict=True, reason=why) for name, why in not_shown.items()}
    return [pytest.param(name, marks=marks[name]) if name in marks else name for name in names]


@pytest.mark.parametrize("mistake", _expected(OTHERS, NOT_SHOWN))
def test_a_mistake_is_shown_with_its_cause(mistake: str, tmp_path: Path) -> None:
    kind = MISTAKES[mistake]
    shown = shown_by(kind, mistake, tmp_path)
    assert kind.cause in shown.causes, shown.sentence or "nothing was shown"


@pytest.mark.parametrize("mistake", _expected(STATES, NOT_SHOWN_ALONE))
def test_state_between_calls_is_shown_within_two_steps_to_a_worker_that_is_alone(mistake: str, tmp_path: Path) -> None:
    (alone,) = outcomes(STATES[mistake], mistake, 1, tmp_path)
    assert alone.steps < 2 and "of the same samples differs" in alone.error, alone


@pytest.mark.parametrize("mistake", STATES)
def test_state_between_calls_is_shown_within_two_steps_to_two_workers(mistake: str, tmp_path: Path) -> None:
    for one in outcomes(STATES[mistake], mistake, 2, tmp_path):
        assert one.steps < 2 and "of the same samples differs" in one.error, one


def test_a_gradient_that_differs_where_losses_are_equal_is_shown_in_the_second_step(tmp_path: Path) -> None:
    mistake = "a_hook_on_gradients_of_one_rank"
    for one in outcomes(MISTAKES[mistake], mistake, 2, tmp_path):
        assert one.steps == 1 and "norm of a gradient of the same samples differs" in one.error, one


@pytest.mark.parametrize("case", HARMLESS)
def test_a_harmless_script_learns_the_same_on_two_workers_as_on_one(case: str, tmp_path: Path) -> None:
    shown = shown_by(HARMLESS[case], case, tmp_path)
    assert not shown.sentence
    expected, *others = shown.weights
    for weights in others:
        for name, value in expected.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
