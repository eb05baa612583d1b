"""A study of finished runs: speed-up by its definition, accuracy over seeds, the recommendation by its rule."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.errors import PacelineError
from paceline.report.study import Study
from paceline.spec import Job, RunRecord
from tests.unit.plan.clusters import forecast_of, gpu_cluster
from tests.unit.report.showing import grown_records, job_of, record_of, records_of, study_of


@pytest.fixture(scope="module")
def study() -> Study:
    """1, 2 and 4 devices, three seeds, fixed global batch."""
    return study_of(records_of())


@pytest.fixture(scope="module")
def grown() -> Study:
    """1, 2 and 4 devices, three seeds, fixed batch a device; 4 devices lose more than a point."""
    return study_of(grown_records())


def test_a_row_averages_its_seeds(study: Study) -> None:
    for row in study.rows:
        runs = [run for run in records_of() if run.world_size == row.devices]
        accuracies = [run.accuracy for run in runs if run.accuracy is not None]
        assert row.seeds == (0, 1, 2) and list(row.runs) == runs
        assert row.accuracy == pytest.approx(fmean(accuracies))
        assert (row.accuracy_min, row.accuracy_max) == (min(accuracies), max(accuracies))
        assert (row.train_s, row.samples_per_s) == (
            median(run.train_s for run in runs),
            median(run.samples_per_s for run in runs),
        )
        parts = row.step_time.data_s + row.step_time.compute_s + row.step_time.exposed_comm_s
        assert row.step_time.total_s == pytest.approx(parts)


@pytest.mark.parametrize("counts", [(1, 2, 4), (2, 4), (3, 5)])
def test_speedup_and_efficiency_follow_their_definition(counts: tuple[int, ...]) -> None:
    study = study_of(records_of(counts))
    assert [row.devices for row in study.rows] == list(counts)
    for row in study.rows:
        speedup = row.samples_per_s / study.base.samples_per_s
        assert row.speedup == pytest.approx(speedup)
        assert row.efficiency == pytest.approx(speedup * counts[0] / row.devices)
    assert f"{counts[0]} device" in study.recommendation.verdict


def test_the_order_of_folders_does_not_matter(study: Study) -> None:
    assert study_of(records_of()[::-1]) == study


def test_slow_first_steps_change_the_training_time_and_not_the_speedup() -> None:
    slow = study_of([record_of(1), record_of(2, train_s=1000.0)])
    assert slow.rows[1].train_s == 1000.0
    assert slow.rows[1].speedup == study_of([record_of(1), record_of(2)]).rows[1].speedup


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 64),
            st.integers(0, 3),
            st.none() | st.floats(0, 1),
            st.just(0.0) | st.floats(1e-3, 1e5),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda run: run[:2],
    ),
    st.floats(0, 0.1),
    st.floats(0, 1),
)
def test_the_fewest_devices_near_the_fastest_that_keep_accuracy_and_efficiency_are_recommended(
    runs: list[tuple[int, int, float | None, float]], tolerance: float, floor: float
) -> None:
    study = study_of(
        [record_of(devices, seed, accuracy=accuracy, samples_per_s=rate) for devices, seed, accuracy, rate in runs],
        tolerance=tolerance,
        efficiency_floor=floor,
    )
    base, found = study.base, study.recommendation
    good = {base.devices: base.samples_per_s}
    for row in study.rows[1:]:
        is_accurate = base.accuracy is None or (
            row.accuracy is not None and row.accuracy >= base.accuracy - tolerance - 1e-9
        )
        if is_accurate and row.efficiency is not None and row.efficiency >= floor - 1e-9:
            good[row.devices] = row.samples_per_s
    near = [devices for devices, rate in good.items() if rate >= 0.97 * max(good.values())]
    assert found.devices == min(near) == study.recommended.devices
    assert set(found.rejected) == {row.devices for row in study.rows} - set(good)
    assert all(row.speedup is None or math.isfinite(row.speedup) for row in study.rows)


@pytest.mark.parametrize(
    ("accuracies", "tolerance", "devices"),
    [
        ((0.98, 0.97), 0.01, 2),
        ((0.98, 0.97), 0.0099, 1),
        ((0.9, 0.99), 0.0, 2),
        ((None, None), 0.01, 2),
        ((0.9, None), 1.0, 1),
    ],
)
def test_losing_exactly_the_tolerance_is_accepted_and_a_gain_is_no_loss(
    accuracies: tuple[float | None, float | None], tolerance: float, devices: int
) -> None:
    records = [record_of(1, accuracy=accuracies[0]), record_of(2, accuracy=accuracies[1])]
    assert study_of(records, tolerance=tolerance).recommendation.devices == devices


def test_a_rejected_count_has_its_number_and_the_limit(study: Study, grown: Study) -> None:
    assert (study.recommendation.devices, grown.recommendation.devices) == (4, 2)
    lost = -100 * (grown.rows[2].accuracy_change or 0.0)
    assert list(grown.recommendation.rejected) == [4]
    assert f"{lost:.2f} points" in grown.recommendation.rejected[4] and "1 point" in grown.recommendation.rejected[4]
    slow = study_of(records_of(), efficiency_floor=0.7)
    efficiency = 100 * (slow.rows[2].efficiency or 0.0)
    assert slow.recommendation.devices == 2
    assert f"{efficiency:.1f} %" in slow.recommendation.rejected[4] and "70 %" in slow.recommendation.rejected[4]


def test_a_faster_smaller_count_is_recommended() -> None:
    records = [record_of(count, samples_per_s=rate) for count, rate in ((1, 100.0), (2, 250.0), (4, 222.0))]
    found = study_of(records).recommendation
    assert found.devices == 2 and "2.50x" in found.verdict
    assert "2 devices" in found.reason and "125 %" in found.reason and "repeat it" in found.reason


def test_a_plan_and_a_study_recommend_the_same_of_the_same_rows() -> None:
    """Two of eight virtual shards for the busiest worker with 4, 5, 6 and 7 devices: all are as fast."""
    planned = forecast_of(Job(global_batch_size=256, virtual_shards=8), gpu_cluster(), [1, 4, 5, 6, 7])
    records = [record_of(row.devices, accuracy=None, samples_per_s=row.samples_per_s) for row in planned.rows]
    assert study_of(records).recommendation.devices == planned.recommended_devices


def test_one_seed_claims_no_spread_and_overlapping_seeds_are_within_it(study: Study, grown: Study) -> None:
    alone = study_of(records_of(seeds=(0,)))
    assert all(row.within_spread is None for row in alone.rows)
    assert [row.within_spread for row in study.rows] == [None, True, True]
    assert [row.within_spread for row in grown.rows] == [None, False, False]
    better = [record_of(count, seed, accuracy=0.9 + 0.01 * count + 0.001 * seed) for count in (1, 2) for seed in (0, 1)]
    assert study_of(better).rows[1].within_spread is False  # a gain beyond the spread is none of it


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_missing_throughput_divides_nothing(rates: tuple[float, float]) -> None:
    study = study_of([record_of(1, samples_per_s=rates[0]), record_of(2, samples_per_s=rates[1])])
    assert study.rows[1].speedup is None and study.recommendation.devices == 1


def test_the_same_weights_are_those_of_every_seed_on_every_count(study: Study) -> None:
    job = job_of(parity="bitwise")
    same = study_of(records_of(job=job))
    assert same.same_weights and "bit for bit" in same.recommendation.verdict
    assert not study.same_weights
    spoiled = records_of(job=job)
    spoiled[-1] = replace(spoiled[-1], weights_sha256="0" * 64)
    assert [row.same_weights for row in study_of(spoiled).rows] == [True, True, False]
    unknown = study_of([record_of(1, 0, job), record_of(2, 1, job)])
    assert unknown.rows[1].same_weights is None and not unknown.same_weights
    assert not study_of(records_of((1,), job=job)).same_weights


def test_a_forecast_stands_beside_its_measurement() -> None:
    runs = [
        replace(run, plan=replace(run.plan, forecast_samples_per_s=0.9 * run.samples_per_s)) for run in records_of()
    ]
    assert [row.forecast_error for row in study_of(runs).rows] == pytest.approx([-0.1] * 3)


LONG = record_of(1, steps=46)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], ["no finished run"]),
        ([record_of(1), record_of(2, job=job_of(optim={"lr": 0.2}))], ["optim.lr", "0.05", "0.2", "2 devices"]),
        ([record_of(1), record_of(2, job=job_of(data={"train_limit": 5}))], ["data.train_limit"]),
        ([LONG, record_of(2, steps=41)], ["46 steps on 1 device", "41 steps on 2 devices"]),
        ([record_of(2, steps=41), LONG], ["46 steps on 1 device", "41 steps on 2 devices"]),
        ([LONG, record_of(1, 1, steps=10)], ["46 steps", "10 steps", "seed 1"]),
        ([LONG, record_of(2, steps=41, stopped="max_minutes are over", is_complete=False)], ["41 steps"]),
        ([*records_of((1, 2)), record_of(2, 1)], ["2 devices", "seed 1"]),
    ],
)
def test_runs_that_are_no_study_are_named(records: list[RunRecord], words: list[str]) -> None:
    with pytest.raises(PacelineError) as caught:
        study_of(records)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "other",
    [
        record_of(2, job=job_of(name="again", data={"dir": "elsewhere"})),
        record_of(2, steps=41, stopped="loss has not improved for 5 evaluations"),
    ],
)
def test_a_name_a_folder_and_an_early_stop_make_no_other_study(other: RunRecord) -> None:
    assert len(study_of([record_of(1), other]).rows) == 2


def test_a_folder_without_a_record_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    for name, content in (("empty", None), ("damaged", b'{"job": '), ("other", b"{}")):
        folder = tmp_path / name
        folder.mkdir()
        if content is not None:
            (folder / "record.json").write_bytes(content)
        with pytest.raises(PacelineError, match=name):
            paceline.report(folder)


# --- the files of a study ---


def test_a_study_leaves_a_page_json_and_csv(study: Study, tmp_path: Path) -> None:
    study_of(records_of(), out=tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "scaling.csv", "scaling.json"]
    plain: dict[str, Any] = json.loads((folder / "scaling.json").read_text())
    assert plain["recommended_devices"] == 4
    assert [row["devices"] for row in plain["rows"]] == [1, 2, 4]
    assert [row["speedup"] for row in plain["rows"]] == [row.speedup for row in study.rows]
    assert plain["job"] == json.loads(json.dumps(study.base.runs[0].job.to_mapping()))
    runs = [run for row in plain["rows"] for run in row["runs"]]
    assert [run["weights_sha256"] for run in runs] == [run.weights_sha256 for run in study.records]
    assert [epoch["epoch"] for epoch in runs[0]["epochs"]] == [1, 2, 3, 4]
    with open(folder / "scaling.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(int(line["devices"]), int(line["seed"])) for line in lines] == [
        (run.world_size, run.job.seed) for run in study.records
    ]
    assert [float(line["train_s"]) for line in lines] == [run.train_s for run in study.records]
    assert [line["recommended"] for line in lines] == ["0"] * 6 + ["1"] * 3


def test_a_run_that_diverged_still_gives_valid_files(tmp_path: Path) -> None:
    study_of([record_of(1), record_of(2, loss=math.nan, train_loss=math.inf, accuracy=0.1)], out=tmp_path)
    text = (tmp_path / "scaling.json").read_text()
    plain = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert plain["rows"][1]["runs"][0]["loss"] is None
    assert "nan" not in (tmp_path / "scaling.csv").read_text()


def test_an_output_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(PacelineError, match="taken"):
        study_of(records_of(), out=tmp_path / "taken")
