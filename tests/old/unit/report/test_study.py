from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.report.study import Study, analyse, detect_grow
from paceline.spec import StepTime
from tests.old.sample_records import sample_grown_records, sample_job, sample_record, sample_study_records


def test_a_row_averages_its_seeds(study: Study) -> None:
    runs = [run for run in sample_study_records() if run.world_size == 2]
    row = study.rows[1]
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    assert [row.devices for row in study.rows] == [1, 2, 4]
    assert row.seeds == (0, 1, 2)
    assert row.accuracy == pytest.approx(fmean(accuracies))
    assert (row.accuracy_min, row.accuracy_max) == (min(accuracies), max(accuracies))
    assert row.train_s == median(run.train_s for run in runs)
    assert row.step_time.total_s == pytest.approx(
        row.step_time.data_s + row.step_time.compute_s + row.step_time.exposed_comm_s
    )


def test_speedup_and_efficiency_follow_their_definition(study: Study) -> None:
    for row in study.rows:
        assert row.samples_per_s == median(run.samples_per_s for run in row.runs)
        assert row.speedup == pytest.approx(row.samples_per_s / study.base.samples_per_s)
        assert row.efficiency == pytest.approx(row.samples_per_s / study.base.samples_per_s / row.devices)


def test_slow_first_steps_change_the_training_time_and_not_the_speedup() -> None:
    records = [sample_record(1), sample_record(2)]
    slow_start = analyse([records[0], replace(records[1], train_s=1000.0)], grow="none", tolerance=0.01)
    assert slow_start.rows[1].train_s == 1000.0
    assert slow_start.rows[1].speedup == analyse(records, grow="none", tolerance=0.01).rows[1].speedup


def test_the_speedup_has_the_range_of_the_steps() -> None:
    records = [sample_record(1), sample_record(2, step_p10_s=0.005, step_time=StepTime(0.01), step_p90_s=0.02)]
    base, row = analyse(records, grow="none", tolerance=0.01).rows
    assert row.speedup is not None
    assert row.speedup_range == pytest.approx((row.speedup / 2, 2 * row.speedup))
    assert base.speedup_range == pytest.approx((1 / 1.12, 1 / 0.94))


def test_steps_without_synchronisation_say_nothing_of_the_range() -> None:
    job = sample_job(aggregation={"method": "local_sgd", "sync_every": 4})
    rows = analyse([sample_record(count, job=job) for count in (1, 2)], grow="none", tolerance=0.01).rows
    assert rows[1].speedup is not None and rows[1].speedup_range is None
    unmeasured = analyse([sample_record(1, step_p10_s=None)], grow="none", tolerance=0.01)
    assert unmeasured.base.speedup_range is None


def test_speedup_is_relative_to_the_smallest_count_that_ran() -> None:
    study = analyse(sample_study_records((2, 4)), grow="none", tolerance=0.01)
    assert study.base.speedup == study.base.efficiency == 1.0
    assert study.rows[1].efficiency == pytest.approx(study.rows[1].samples_per_s / study.base.samples_per_s / 2)
    assert "the speed of 2 devices" in study.recommendation.verdict


def test_the_largest_count_within_both_limits_is_recommended(study: Study, grown_study: Study) -> None:
    assert study.recommendation.devices == 4
    assert not study.recommendation.rejected
    assert grown_study.recommendation.devices == 2
    assert list(grown_study.recommendation.rejected) == [4]
    assert "it loses 1.35 points of accuracy" in grown_study.recommendation.rejected[4]


def test_an_efficiency_below_the_floor_is_rejected_with_its_number() -> None:
    study = analyse(sample_study_records(), grow="none", tolerance=0.01, efficiency_floor=0.7)
    assert study.recommendation.devices == 2
    assert "55.9 %" in study.recommendation.rejected[4]
    assert "the floor of 70 %" in study.recommendation.rejected[4]


def test_losing_exactly_the_tolerance_is_accepted() -> None:
    records = [sample_record(1, accuracy=0.98), sample_record(2, accuracy=0.97)]
    assert analyse(records, grow="none", tolerance=0.01).recommendation.devices == 2
    assert analyse(records, grow="none", tolerance=0.0099).recommendation.devices == 1


def test_a_gain_in_accuracy_is_no_reason_to_reject() -> None:
    records = [sample_record(1, accuracy=0.9), sample_record(2, accuracy=0.99)]
    assert analyse(records, grow="none", tolerance=0.01).recommendation.devices == 2


def test_a_faster_smaller_count_is_pointed_out() -> None:
    records = [sample_record(count, samples_per_s=rate) for count, rate in ((1, 100.0), (2, 250.0), (4, 222.0))]
    found = analyse(records, grow="none", tolerance=0.01).recommendation
    assert found.devices == 4
    assert "the fastest of those within the limits is 2 devices: 250 instead of 222 samples/s" in found.reason


def test_one_seed_claims_no_spread() -> None:
    study = analyse(sample_study_records(seeds=(0,)), grow="none", tolerance=0.01)
    assert all(row.accuracy_std is None and row.within_spread is None for row in study.rows)


def test_overlapping_ranges_are_within_the_spread(study: Study, grown_study: Study) -> None:
    assert [row.within_spread for row in study.rows] == [None, True, True]
    assert [row.within_spread for row in grown_study.rows] == [None, False, False]


def test_without_evaluation_time_alone_decides() -> None:
    records = [sample_record(count, accuracy=None) for count in (1, 2)]
    study = analyse(records, grow="none", tolerance=0.01)
    assert not study.has_accuracy
    assert study.rows[1].accuracy_change is None
    assert study.recommendation.devices == 2
    assert "No accuracy was measured" in study.recommendation.reason


def test_a_count_whose_accuracy_is_missing_is_rejected() -> None:
    study = analyse([sample_record(1), sample_record(2, accuracy=None)], grow="none", tolerance=0.01)
    assert study.recommendation.rejected == {2: "Not 2 devices: its accuracy was not measured."}


def test_a_single_device_count_is_no_comparison() -> None:
    study = analyse(sample_study_records((1,)), grow="none", tolerance=0.01)
    assert study.recommendation.verdict == "Only 1 device measured: there is nothing to compare with yet."
    assert not study.same_weights


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_missing_throughput_divides_nothing(rates: tuple[float, float]) -> None:
    records = [sample_record(1, samples_per_s=rates[0]), sample_record(2, samples_per_s=rates[1])]
    study = analyse(records, grow="none", tolerance=0.01)
    assert study.rows[1].speedup is None
    assert study.recommendation.devices == 1


def test_no_larger_count_within_the_limits() -> None:
    study = analyse(sample_study_records(), grow="none", tolerance=0.01, efficiency_floor=0.95)
    assert study.recommendation.verdict == "Stay with 1 device: adding devices does not pay here."
    assert list(study.recommendation.rejected) == [2, 4]


def test_same_weights_means_every_seed_on_every_count(bitwise_study: Study, study: Study) -> None:
    assert bitwise_study.same_weights
    assert "the same weights bit for bit" in bitwise_study.recommendation.verdict
    assert not study.same_weights
    records = sample_study_records(job=sample_job(parity="bitwise"))
    records[-1] = sample_record(4, 2, sample_job(parity="bitwise"), weights_sha256="0" * 64)
    spoiled = analyse(records, grow="none", tolerance=0.01)
    assert [row.same_weights for row in spoiled.rows] == [True, True, False]


def test_weights_of_a_seed_the_smallest_count_lacks_cannot_be_compared() -> None:
    job = sample_job(parity="bitwise")
    study = analyse([sample_record(1, 0, job), sample_record(2, 1, job)], grow="none", tolerance=0.01)
    assert study.rows[1].same_weights is None
    assert not study.same_weights


def test_no_records_is_a_sentence() -> None:
    with pytest.raises(PacelineError, match="no finished run"):
        analyse([], grow="none", tolerance=0.01)


def test_runs_of_different_jobs_are_refused_by_key() -> None:
    other = sample_record(2, job=sample_job(optim={"lr": 0.2}))
    with pytest.raises(PacelineError, match=r"optim\.lr is 0\.05 on 1 device \(seed 0\) and 0\.2 on 2 devices"):
        analyse([sample_record(1), other], grow="none", tolerance=0.01)


def test_a_grown_batch_needs_to_be_said() -> None:
    records = sample_grown_records()
    assert detect_grow(records) == "batch"
    assert detect_grow(sample_study_records()) == "none"
    with pytest.raises(PacelineError, match="say grow = 'batch'"):
        analyse(records, grow="none", tolerance=0.01)


def test_where_data_lie_and_what_the_job_is_called_do_not_matter() -> None:
    other = sample_record(2, job=sample_job(name="again", data={"dir": "elsewhere"}))
    assert len(analyse([sample_record(1), other], grow="none", tolerance=0.01).rows) == 2


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.2), ("sqrt", 0.1), ("none", 0.05)])
def test_peak_learning_rate_follows_the_rule(rule: str, expected: float) -> None:
    job = sample_job(optim={"lr_scaling": rule}).grown(4)
    assert job.optim.lr * job.lr_scale == pytest.approx(expected)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 64),
            st.integers(0, 3),
            st.one_of(st.none(), st.floats(0, 1)),
            st.one_of(st.just(0.0), st.floats(1e-3, 1e5)),
        ),
        min_size=1,
        max_size=12,
        unique_by=lambda run: run[:2],
    ),
    st.floats(0, 0.1),
    st.floats(0, 1),
)
def test_the_recommendation_keeps_its_rule(
    runs: list[tuple[int, int, float | None, float]], tolerance: float, floor: float
) -> None:
    records = [
        sample_record(devices, seed, accuracy=accuracy, samples_per_s=rate) for devices, seed, accuracy, rate in runs
    ]
    study = analyse(records, grow="none", tolerance=tolerance, efficiency_floor=floor)
    base, found = study.base, study.recommendation
    good = {base.devices}
    for row in study.rows[1:]:
        accurate = base.accuracy is None or (
            row.accuracy is not None and row.accuracy >= base.accuracy - tolerance - 1e-9
        )
        if accurate and row.efficiency is not None and row.efficiency >= floor - 1e-9:
            good.add(row.devices)
    assert found.devices == max(good)
    assert set(found.rejected) == {row.devices for row in study.rows} - good
    assert all(row.speedup is None or math.isfinite(row.speedup) for row in study.rows)


def test_runs_of_different_length_are_no_study() -> None:
    whole, short = sample_record(1, steps=46), sample_record(2, steps=41)
    sentence = r"46 steps on 1 device \(seed 0\) and 41 steps on 2 devices \(seed 0\); train the shorter one on"
    for records in ([whole, short], [short, whole]):
        with pytest.raises(PacelineError, match=sentence):
            analyse(records, grow="none", tolerance=0.01)
    with pytest.raises(PacelineError, match=r"46 steps on 1 device .* and 10 steps on 1 device"):
        analyse([whole, sample_record(1, seed=1, steps=10)], grow="none", tolerance=0.01)


def test_a_run_that_stopped_by_itself_may_be_shorter() -> None:
    records = [sample_record(1), sample_record(2, steps=41, stopped="loss has not improved for 5 evaluations")]
    assert len(analyse(records, grow="none", tolerance=0.01).rows) == 2
    out_of_time = replace(records[1], stopped="max_minutes = 1 are over", is_complete=False)
    with pytest.raises(PacelineError, match="not of one length"):
        analyse([records[0], out_of_time], grow="none", tolerance=0.01)


def test_where_the_batch_grew_runs_of_one_length_have_as_many_epochs_or_steps() -> None:
    first, second = sample_grown_records((1, 2), (0,))
    assert first.steps != second.steps
    assert len(analyse([first, second], grow="batch", tolerance=0.01).rows) == 2
    cut = [replace(first, steps=5, epochs=first.epochs[:1]), replace(second, steps=5, epochs=second.epochs[:2])]
    assert len(analyse(cut, grow="batch", tolerance=0.01).rows) == 2
    with pytest.raises(PacelineError, match="not of one length"):
        analyse([first, cut[1]], grow="batch", tolerance=0.01)


def test_a_run_that_is_given_twice_is_not_two_seeds() -> None:
    records = sample_study_records((1, 2), (0, 1))
    with pytest.raises(PacelineError, match=r"Two of these runs are on 2 devices \(seed 1\): a study takes one run"):
        analyse([*records, records[-1]], grow="none", tolerance=0.01)
