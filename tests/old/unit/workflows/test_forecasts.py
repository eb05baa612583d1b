"""Forecasts that ride along with plans, and come back as experience."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.errors import ClusterError
from paceline.plan.assumptions import past_error
from paceline.spec import Cluster, Device, ForecastCheck, Job, JobTiming, Link, MicroBatchTiming, Node, Plan
from paceline.spec.cluster import MOST_CHECKS
from paceline.workflows.forecasts import feed_back, with_forecasts, without_forecasts
from tests.old.sample_records import sample_record

JOB = Job.from_mapping({"name": "small", "global_batch_size": 64, "virtual_shards": 4})


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    links = tuple(
        Link((f"CPU{one}", f"CPU{other}"), "SHM", 2e9, 1e-5, "measured")
        for one in range(4)
        for other in range(one + 1, 4)
    )
    node = Node("here", 4, 2**34, "", tuple(Device("cpu", i, "", 2**32) for i in range(4)), links=links)
    sizes = tuple(MicroBatchTiming(size, 0.001 + 0.0005 * size) for size in (8, 16, 32, 64))
    timing = JobTiming("small", "CPU0", 100_000, 1, sizes, 64, 1e6, 1e8)
    path = tmp_path / "cluster.json"
    Cluster((node,), timings=(timing,)).save(path)
    return path


def test_without_a_probe_plans_stay_as_they_are(tmp_path: Path, cluster_file: Path) -> None:
    assert with_forecasts(JOB, [Plan()], tmp_path / "none.json", print) == [Plan()]
    other = dataclasses.replace(JOB, name="other")
    assert with_forecasts(other, [Plan()], cluster_file, print) == [Plan()]


def test_a_broken_file_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{")
    with pytest.raises(ClusterError, match="cannot be read as a cluster"):
        with_forecasts(JOB, [Plan()], tmp_path / "cluster.json", print)


def test_a_plan_carries_what_is_expected_of_it(cluster_file: Path) -> None:
    alone, two = with_forecasts(JOB, [Plan(), Plan(world_size=2)], cluster_file, print)
    assert alone.forecast_samples_per_s == pytest.approx(64 / (0.001 + 0.0005 * 64), rel=0.1)
    assert two.forecast_samples_per_s is not None and two.world_size == 2
    assert without_forecasts(two) == Plan(world_size=2)


def test_experience_is_kept_with_the_cluster(cluster_file: Path) -> None:
    assert past_error(Cluster.load(cluster_file).checks) == ""
    done = sample_record(1)
    plain = dataclasses.replace(done, plan=without_forecasts(done.plan))
    right = dataclasses.replace(done, plan=dataclasses.replace(done.plan, forecast_samples_per_s=done.samples_per_s))
    wrong = dataclasses.replace(
        done, plan=dataclasses.replace(done.plan, forecast_samples_per_s=1.2 * done.samples_per_s)
    )
    feed_back(plain, cluster_file)
    assert Cluster.load(cluster_file).checks == ()
    for _ in range(9):
        feed_back(right, cluster_file)
    feed_back(wrong, cluster_file)
    known = Cluster.load(cluster_file)
    assert past_error(known.checks) == "within 0 % on the last 10 runs"  # the 90th percentile
    feed_back(wrong, cluster_file)
    assert past_error(Cluster.load(cluster_file).checks) == "within 20 % on the last 11 runs"


def test_old_experience_is_forgotten() -> None:
    cluster = Cluster(())
    for number in range(MOST_CHECKS + 5):
        cluster = cluster.checked(ForecastCheck("small", number + 1, 1.0, 1.0))
    assert [check.devices for check in cluster.checks] == list(range(6, MOST_CHECKS + 6))
