"""Forecasts of published steps: the 99 scaling tables from their first rows, and those of Pollux from a few."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
        ("two", False, None, 3.9, 23.4),
        ("three", False, True, 3.1, 18.2),
        ("three", True, None, 3.0, 10.2),
        ("span", None, None, 2.4, 10.1),
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


def pollux_rows(model: str) -> list[StepRow]:
    """Measured steps of the public artifact of Pollux (Qiao et al., OSDI 2021): 1 to 16 nodes of 1 to 4 T4."""
    found = []
    for kind in ("p", "s"):
        with open(Path(DATA or "") / "pollux" / f"{model}-{kind}.csv", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                nodes = [int(digit) for digit in row.get("placement", "")]
                if not nodes:
                    each, rest = divmod(int(row["num_replicas"]), int(row["num_nodes"]))
                    nodes = [each + (node < rest) for node in range(int(row["num_nodes"]))]
                step = StepRow(tuple(nodes), int(row["local_bsz"]), step_time_s=float(row["step_time"]))
                found.append(replace(step, sync_time_s=float(row["sync_time"])))
    return found


@pytest.mark.nightly
@pytest.mark.budget(processor_s=400)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["cifar10", "imagenet"])
def test_thirteen_of_polluxs_steps_forecast_all_others(model: str) -> None:
    """From a row of one device and twelve random others; figures with `pytest -s`."""
    rows, held = pollux_rows(model), []
    for draw in range(4):
        random = np.random.default_rng(draw)
        first = random.choice([place for place, row in enumerate(rows) if row.num_workers == 1])
        others = random.choice([place for place in range(len(rows)) if place != first], 12, replace=False)
        known = {int(first), *others.tolist()}
        wanted = [row for place, row in enumerate(rows) if place not in known]
        forecasts = predict(fit([rows[place] for place in sorted(known)]), wanted)
        both = list(zip(forecasts, map(seconds_of, wanted), strict=True))
        median, ninetieth = np.quantile([100 * abs(one.step_s / seconds - 1) for one, seconds in both], (0.5, 0.9))
        held.append(100 * np.mean([one.low_s <= seconds <= one.high_s for one, seconds in both]))
        print(f"{model}, draw {draw}: median {median:.1f} %, 90th percentile {ninetieth:.1f} %, held {held[-1]:.0f} %")
        assert median <= 7 and held[-1] >= 70
    assert 85 <= np.mean(held) <= 97
