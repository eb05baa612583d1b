"""A probe times steps of a job on the workers that will train it; a plan needs no more."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

import paceline
from paceline.errors import ClusterError, JobError, ModelError
from paceline.spec import Cluster, StepRow
from paceline.spec.cluster import JobTiming

OTHER = JobTiming("other", "a device", 10, 1, (StepRow((1,), 1, step_time_s=1.0),))


@pytest.mark.budget(processor_s=20)
def test_a_probe_of_two_workers_is_all_that_a_plan_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the file already, of another job and of checked forecasts, stays there."""
    monkeypatch.chdir(tmp_path)
    before = Cluster((), timings=(OTHER,), forecast_errors=(0.1,))
    before.save(tmp_path / "cluster.json")
    slow = ["global_batch_size=512"]  # the budget is over after one step
    timing = paceline.probe("digits-lenet", workers=2, budget=1.0, settings=slow)
    cluster = Cluster.load(tmp_path / "cluster.json")
    assert cluster.forecast_errors == before.forecast_errors
    assert {timing.job for timing in cluster.timings} == {"other", "digits-lenet"}
    assert timing in cluster.timings
    assert timing.num_parameters == 129_068  # of LeNet for images of 8 x 8
    assert timing.num_samples is not None and timing.num_samples > 1000
    whole, halved, pair = timing.steps
    assert [row.workers_per_node for row in timing.steps] == [(1,), (1,), (2,)]
    assert whole.samples_per_worker == halved.samples_per_worker == 2 * pair.samples_per_worker == 512
    assert whole.micro_batch_size == 2 * halved.micro_batch_size == pair.micro_batch_size
    for row in timing.steps:
        assert row.gradient_bytes == 4 * timing.num_parameters
        assert row.step_time_s
    assert whole.sync_time_s is None and pair.sync_time_s is not None
    planned = paceline.plan("digits-lenet", devices="1..4", link_rate=1e9, settings=slow).forecast
    assert [row.devices for row in planned.rows] == [1, 2, 3, 4]
    assert all(0 < row.low_s < row.step_s < row.high_s for row in planned.rows)
    assert "10 %" in planned.past_error
    assert not list((tmp_path / "runs").glob("*"))  # what workers left for each other is gone


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget": -1.0}, JobError, ["budget"]),
        ({"budget": math.nan}, JobError, ["budget"]),
        ({"budget": 0.0}, JobError, ["budget"]),
        ({"workers": 0}, JobError, ["workers"]),
        ({"threads": -1}, JobError, ["threads"]),
        ({"out": "nowhere/cluster.json"}, ClusterError, ["nowhere/cluster.json"]),
        ({"out": "damaged.json"}, ClusterError, ["damaged.json", "remove it, or name another file"]),
    ],
)
def test_a_probe_that_cannot_be_written_is_refused_before_it_measures(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, object],
    error: type[Exception],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.json").write_text("{")
    with pytest.raises(error) as caught:
        paceline.probe("digits-lenet", **arguments)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.budget(processor_s=10)
def test_a_trace_finds_modules_of_the_working_directory_as_workers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_the_job.py").write_text("import torch\nbuild = lambda: torch.nn.Linear(4, 2)\n")
    settings = ["model=beside_the_job:build", "data=beside_the_job:pairs"]
    with (tmp_path / "beside_the_job.py").open("a") as file:
        file.write("pairs = lambda split: [(torch.zeros(4), 0)] * 64\ndicts = lambda split: [{'x': 0, 'y': 1}] * 64\n")
    assert paceline.dry_run_mesh("digits-lenet", "dp2", settings=settings).parameter_bytes == 4 * 10
    with pytest.raises(ModelError, match="pairs"):
        paceline.dry_run_mesh("digits-lenet", "dp2", settings=[settings[0], "data=beside_the_job:dicts"])
