"""The callbacks that a job names."""

from __future__ import annotations

import pytest

from paceline.errors import JobError
from paceline.spec import CallbackSpec
from paceline.train.callbacks import build_callbacks
from tests.old.ranks.loop_callbacks import StopOnOne

HERE = "tests.old.ranks.loop_callbacks"


def test_callbacks_are_made_with_their_options_in_order() -> None:
    first, second = build_callbacks([CallbackSpec(f"{HERE}:StopOnOne", {"at_step": n}) for n in (3, 5)])
    assert isinstance(first, StopOnOne)
    assert isinstance(second, StopOnOne)
    assert build_callbacks(()) == []


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("Recorder", {}, "callbacks.0..name = 'Recorder' is not an import path"),
        (f"{HERE}:Missing", {}, f"the module '{HERE}' has no 'Missing'"),
        ("nowhere_at_all:Missing", {}, "there is no module 'nowhere_at_all'"),
        (f"{HERE}:StopOnOne", {"at_steps": 1}, "has no option 'at_steps': did you mean 'at_step'. It has at_step"),
        (f"{HERE}:NoCallback", {}, "made a NoCallback; it should name a subclass of paceline.Callback"),
        (f"{HERE}:StopOnOne", {}, "needs the option 'at_step'"),
    ],
)
def test_what_is_none_is_one_sentence(name: str, options: dict[str, int], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        build_callbacks([CallbackSpec(name, options)])
