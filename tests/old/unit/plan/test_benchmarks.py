"""The benchmarks of the planner: where their figures come from."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.plan.inputs import ForecastRequest, plan_inputs
from paceline.plan.step_constants import Observation, Placement
from paceline.spec import Job, ModelSpec
from tests.old.sample_clusters import cpu_cluster
from tests.old.unit.plan.test_collectives import one_each

at_scale = importlib.import_module("benchmarks.at_scale")
hosts_meshes = importlib.import_module("benchmarks.hosts_meshes")
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


def test_replicas_run_the_sum_that_was_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(model=ModelSpec("benchmarks.hosts_meshes:perceptron"), global_batch_size=64, virtual_shards=8)
    known = plan_inputs(job, cpu_cluster(2), ForecastRequest(), 4)
    monkeypatch.setattr(hosts_meshes, "cheapest_algorithm", lambda *_: ("ring", 1.0))
    plain, sharded = hosts_meshes.planned_rows(job, known, ["dp", "fsdp"], 4, 2)
    assert hosts_meshes.plan_of(plain).algorithm == "ring"
    assert hosts_meshes.plan_of(sharded).algorithm == "all_reduce"
    # Of each rank in a ring of four: 2 (n - 1)/n of the gradients. One rank of a node sends to the other node.
    assert plain.formula_mb == pytest.approx(1.5 * 4 * 24_410_110 / 1e6)


def test_workers_lie_evenly_on_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hosts_meshes, "why_not", lambda: None)
    arguments = ["--data", str(tmp_path), "--nodes", "2", "--workers", "3", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["hosts_meshes", *arguments])
    with pytest.raises(SystemExit):
        hosts_meshes.main()
