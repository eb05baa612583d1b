"""`paceline probe` with real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import env
from paceline.launch.run_workers import run_workers
from paceline.launch.team import LaunchOptions
from paceline.measure.link_probe import time_loopback, time_shared_memory
from paceline.measure.values import NetworkProbe
from paceline.spec import Cluster, Plan
from tests.old.ranks.command_line import TRACEBACK, paceline, succeeded


@pytest.mark.parametrize("measure", [time_loopback, time_shared_memory])
def test_two_processes_tell_each_other_something(measure: Any) -> None:
    times = measure()
    # Slower than a disk of the nineties or faster than any memory would be a mistake in the arithmetic.
    assert 1e6 < times.bytes_per_s < 1e12
    assert 1e-8 < times.latency_s < 1


@pytest.mark.slow
def test_workers_time_what_they_send_each_other(tmp_path: Path) -> None:
    # The one between them looks on.
    request = {"hostnames": ["a", "b", "c"], "pairs": [[0, 2]], "num_streams": 2}
    asked = tmp_path / "request.json"
    asked.write_text(json.dumps(request))
    program = ["-m", "paceline.measure.network_probe", str(asked), str(tmp_path / "out")]
    run_workers(Plan(world_size=3), program, LaunchOptions(tmp_path))
    (link,) = NetworkProbe.load(tmp_path / "out" / "network.json").links
    assert link.ends == ("a", "c")
    assert link.interface == (env.own_interface() or "lo")
    assert link.single_stream_bytes_per_s is not None
    assert 1e6 < link.single_stream_bytes_per_s <= link.bytes_per_s < 1e12
    assert 1e-8 < link.latency_s < 1


@pytest.mark.slow
def test_the_command_measures_a_recipe_and_its_file_loads_back(tmp_path: Path) -> None:
    options = ("--set", "global_batch_size=64", "--set", "parity=numeric", "-n", "2", "--budget", "60")
    shown = json.loads(succeeded(paceline("probe", "digits-lenet", *options, "--json", cwd=tmp_path)).stdout)
    cluster = Cluster.load(tmp_path / "cluster.json")
    (timing,) = cluster.timings
    assert shown["timing"]["micro_batches"][0]["seconds"] == timing.micro_batches[0].seconds
    sizes = [row.micro_batch_size for row in timing.micro_batches]
    # As far as one worker alone has to go, though two were asked for.
    assert sizes == [1, 2, 4, 8, 16, 32, 64][: len(sizes)]
    assert len(sizes) == 7 or "exceed 60 s for all" in shown["not_measured"][-1]  # this machine may be busy
    assert timing.largest_micro_batch_size == sizes[-1]
    seconds = [row.seconds for row in timing.micro_batches]
    assert min(seconds) > 0
    assert timing.load is not None
    if not timing.load.is_disturbing:  # of other programs on this machine
        # More samples take longer in all, and less each.
        assert max(seconds[-2:]) > min(seconds[:2])
        assert sizes[-1] / seconds[-1] > 1 / seconds[0]
        # Neighbours cost something at most; on one core they would take twice as long.
        assert 0.5 < timing.together_slowdown < 4
    assert timing.num_parameters == 129_068
    assert timing.threads_per_worker == 1
    assert timing.loader_samples_per_s is not None
    assert timing.loader_samples_per_s > 0
    assert timing.checkpoint_bytes_per_s is not None
    assert timing.checkpoint_bytes_per_s > 0
    assert timing.loads_between_passes
    assert timing.update_s is not None
    assert 0 < timing.update_s < max(seconds)
    assert (timing.workers_together, timing.workers_together_on_node) == (2, 2)
    assert timing.together_slowdown > 0
    # What training would choose from, and no sum costs as much as seconds.
    assert [timed.algorithm for timed in timing.sums] == ["all_reduce", "hierarchical"]
    assert all(timed.wire == "float32" and 0 <= timed.waiting_s < 10 * max(seconds) for timed in timing.sums)
    assert timing.sharding is not None
    assert timing.sharding.num_bytes == 2**20
    assert min(timing.sharding.gather_s, timing.sharding.scatter_s) > 1e-6
    assert list((tmp_path / "runs").iterdir()) == []

    # A second look, at the links alone, keeps what is known of the job.
    again = succeeded(paceline("probe", cwd=tmp_path))
    assert again.stdout.splitlines()[-1] == "cluster.json"
    assert Cluster.load(tmp_path / "cluster.json").timings == (timing,)


@pytest.mark.slow
def test_mistakes_are_one_sentence_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "file").write_text("")
    for options, words in (
        (("--out", "broken.json"), "broken.json cannot be read as a cluster"),
        (("--folder", "file"), "The folder file cannot be used"),
        (("digits-lenett",), "did you mean 'digits-lenet'"),
        (("digits-lenet", "--set", "model=nosuch:model"), "nosuch"),
    ):
        result = paceline("probe", *options, cwd=tmp_path)
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        assert words in result.stderr
        assert TRACEBACK not in result.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["broken.json", "file", "runs"]
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_a_model_that_fails_leaves_its_report(tmp_path: Path) -> None:
    wrong = ("--set", "model=gpt", "--set", "model.options={vocab_size=9, context=9}")
    result = paceline("probe", "digits-lenet", *wrong, "--quiet", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert TRACEBACK in result.stderr
    (scratch,) = (tmp_path / "runs").iterdir()
    assert (scratch / "failures").is_dir()
    assert not (tmp_path / "cluster.json").exists()


@pytest.mark.slow
def test_a_worker_alone_has_no_neighbours_to_be_timed_with(tmp_path: Path) -> None:
    options = ("--set", "global_batch_size=8", "-n", "1", "--budget", "5", "--quiet")
    succeeded(paceline("probe", "digits-lenet", *options, cwd=tmp_path))
    (timing,) = Cluster.load(tmp_path / "cluster.json").timings
    assert (timing.workers_together, timing.workers_together_on_node, timing.together_slowdown) == (1, 1, 1.0)
    assert timing.sums == ()
    assert timing.sharding is None
    assert timing.update_s is not None
