"""Forecasts of the 99 published scaling tables from their first rows are as good as the project's own table says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from paceline.measure.rows import read_rows
from paceline.plan.step_model import fit, predict, seconds_of
from paceline.spec import StepRow

DATA = os.environ.get("PACELINE_TEST_DATA")

pytestmark = pytest.mark.skipif(DATA is None, reason="needs PACELINE_TEST_DATA")


@dataclass(frozen=True)
class Case:
    """A row that was forecast from others."""

    subset: str
    is_strong: bool
    is_inside_a_node: bool
    error: float
    """|forecast / measured - 1|."""
    is_held: bool
    """Whether the 90 % interval holds the measurement."""


def cases_of(rows: Sequence[StepRow]) -> Iterator[Case]:
    """Rows from the first two, from the first three, and from the first and the last."""
    is_strong = len({row.micro_batch_size for row in rows}) > 1
    for subset, places in {"two": {0, 1}, "three": {0, 1, 2}, "span": {0, len(rows) - 1}}.items():
        known = [row for place, row in enumerate(rows) if place in places]
        wanted = [row for place, row in enumerate(rows) if place not in places]
        if wanted:
            forecasts = predict(fit(known), wanted)
            for row, found in zip(wanted, forecasts, strict=True):
                yield Case(
                    subset,
                    is_strong,
                    row.num_nodes == 1,
                    abs(found.step_s / seconds_of(row) - 1),
                    found.low_s <= seconds_of(row) <= found.high_s,
                )


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    folder = Path(DATA or "") / "scaling"
    names = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    tables = [read_rows(folder / f"{name}.csv") for name in names]
    assert len(tables) == 99
    return [case for rows in tables for case in cases_of(rows)]


@pytest.mark.nightly
@pytest.mark.budget(processor_s=400)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("subset", "is_strong", "inside", "median", "ninetieth"),
    [
        # Today's medians and 90th percentiles, in per cent, and a tenth more.
        ("two", False, None, 4.3, 25.8),
        ("three", False, True, 4.9, 21.3),
        ("three", True, None, 3.0, 10.5),
        ("span", None, None, 2.4, 10.4),
    ],
)
def test_errors_are_at_most_a_tenth_above_those_of_the_projects_table(
    cases: list[Case], subset: str, is_strong: bool | None, inside: bool | None, median: float, ninetieth: float
) -> None:
    errors = [
        100 * case.error
        for case in cases
        if case.subset == subset and is_strong in (None, case.is_strong) and inside in (None, case.is_inside_a_node)
    ]
    assert len(errors) >= 16
    assert np.median(errors) <= 1.1 * median
    assert np.quantile(errors, 0.9) <= 1.1 * ninetieth


@pytest.mark.nightly
@pytest.mark.budget(processor_s=400)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("subset", ["two", "three", "span"])
def test_intervals_of_nine_in_ten_hold_about_nine_in_ten(cases: list[Case], subset: str) -> None:
    held = [case.is_held for case in cases if case.subset == subset]
    assert 0.85 <= np.mean(held) <= 0.97
