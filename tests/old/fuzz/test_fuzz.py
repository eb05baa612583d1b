"""A few seconds of what `make fuzz` does for ten minutes."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from paceline.errors import PacelineError
from tests.old.fuzz.engine import Target, run
from tests.old.fuzz.targets import TARGETS
from tests.old.fuzz.values import Case


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whatever_is_read_or_typed_is_used_or_refused_in_one_sentence(target: Target) -> None:
    findings = run([target], 0.0, first_seed=7, batch=5 if target.name.startswith("paceline") else 30)
    assert findings.are_none, findings.text()


def _fails(case: Case) -> None:
    if case.content == "bug":
        raise KeyError("x")
    if case.content == "refused":
        raise PacelineError("no")


@pytest.mark.parametrize(("content", "kind"), [("bug", "tracebacks"), ("accepted", "accepted"), ("refused", None)])
def test_the_engine_notices(content: str, kind: str | None) -> None:
    findings = run([Target("t", st.just(Case(content, "it cannot be meant")), _fails)], 0.0, batch=1)
    assert findings.are_none == (kind is None)
    assert kind is None or len(getattr(findings, kind)) == 1
