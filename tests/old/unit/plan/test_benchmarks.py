"""The benchmarks of the planner: where their figures come from."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from paceline.plan.step_constants import Observation, Placement
from tests.old.unit.plan.test_collectives import one_each

at_scale = importlib.import_module("benchmarks.at_scale")
forecast_tables = importlib.import_module("benchmarks.forecast_tables.__main__")

TABLES = [
    forecast_tables.Table(name, name, tuple(Observation(Placement(one_each(n), 8), 1.0) for n in (1, 2, 4)))
    for name in ("here", "there")
]


def test_priors_without_a_family_come_from_all_others_whatever_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def chosen_without(_pool: object, tables: object, families: object) -> dict[str, Any]:
        asked.append((tables, families))
        return {}

    monkeypatch.setattr(forecast_tables, "tables_of", lambda _folder: TABLES)
    monkeypatch.setattr(forecast_tables, "chosen_without", chosen_without)
    monkeypatch.setattr(forecast_tables, "cases_of", _no_cases)
    arguments = ["--data", ".", "--leave-one-out", "--only", "here", "--processes", "1"]
    monkeypatch.setattr(sys, "argv", ["forecast_tables", *arguments])
    forecast_tables.main()
    assert asked == [(TABLES, ["here"])]
    monkeypatch.setattr(sys, "argv", ["forecast_tables", *arguments, "--suggest"])
    with pytest.raises(SystemExit):
        forecast_tables.main()


def _no_cases(_table: object, _usual: object) -> list[Any]:
    return []


def test_a_run_that_no_efficiency_explains_is_not_called_fitted() -> None:
    assert [family[0].fitted() is None for family in at_scale.RUNS] == [False, False, False, True, False]
    assert "| 100%, and that is too little |" in at_scale.anchors()
