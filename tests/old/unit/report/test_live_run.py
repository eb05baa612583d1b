from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.report.live_page import differences, live_update, render_live_page
from paceline.report.live_plots import live_plots
from paceline.report.live_run import RunFollower
from paceline.spec.record import StepTime
from paceline.spec.run_status import GpuUse
from tests.old.live_runs import make_live_run, write_lines, write_status


def test_a_run_is_read_as_it_trains(tmp_path: Path) -> None:
    folder = make_live_run(tmp_path / "run")
    follower = RunFollower(folder)
    run = follower.read()
    assert (run.name, run.state, run.step) == ("run", "training", 120)
    assert len(run.metrics.steps) == len(run.metrics.losses) == 120
    assert run.metrics.samples_per_s == [1500.0, 1600.0]
    assert run.metrics.step_time == StepTime(0.04, 0.004, 0.03, 0.006)
    assert run.metrics.evaluations == [(120, {"accuracy": 0.91, "loss": 0.4})]
    assert [worker.node for worker in run.workers] == ["node0", "node1"]
    write_lines(folder, [{"step": 121, "loss": 0.25, "samples_seen": 7744}])
    assert follower.read().metrics.losses[-1] == 0.25


def test_gpus_are_those_of_workers_on_this_machine(tmp_path: Path) -> None:
    folder = make_live_run(tmp_path / "run")
    gpus = {100: GpuUse(2, 3 * 2**30, 0.62)}
    assert RunFollower(folder).read(gpus).gpus == {}  # process 100 is on another node
    write_status(folder, 120, nodes=("", "node1"))
    run = RunFollower(folder).read(gpus)
    assert run.gpus == {0: gpus[100]}
    assert "GPU 2, 3.0 GiB, 62% busy" in live_update([run])["parts"]["details"]


def test_a_line_that_is_half_written_waits_for_its_end(tmp_path: Path) -> None:
    folder = make_live_run(tmp_path / "run", num_steps=2)
    follower = RunFollower(folder)
    before = follower.read().metrics.losses
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 3, "lo')
        file.flush()
        assert follower.read().metrics.losses == before
        file.write('ss": 0.125}\n')
    assert follower.read().metrics.losses == [*before, 0.125]


def test_a_file_in_the_place_of_the_metrics_is_read_from_its_beginning(tmp_path: Path) -> None:
    folder = make_live_run(tmp_path / "run")
    follower = RunFollower(folder)
    follower.read()
    draft = folder / "metrics.jsonl.tmp"  # as a run that is resumed does
    draft.write_text('{"step": 1, "loss": 9.0}\n', encoding="utf-8")
    draft.replace(folder / "metrics.jsonl")
    assert follower.read().metrics.losses == [9.0]


def test_losses_that_are_not_finite_and_lines_that_are_none_break_nothing(tmp_path: Path) -> None:
    folder = make_live_run(tmp_path / "run", num_steps=2)
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss": NaN}\n[1]\nno json\n{"step": "x", "loss": 1}\n{"step": 4, "loss": Infinity}\n')
    run = RunFollower(folder).read()
    assert run.metrics.losses[-2:] == [None, None]
    json.dumps(live_update([run]), allow_nan=False)


def test_processor_use_is_that_between_two_looks(tmp_path: Path) -> None:
    folder = make_live_run(tmp_path / "run")
    follower = RunFollower(folder)
    now = time.time()
    write_status(folder, 120, now, processor_s=5.0)
    assert follower.read().processor_use == {}
    write_status(folder, 121, now + 2, processor_s=6.5)
    assert follower.read().processor_use == {0: 0.75, 1: 0.75}


def test_a_run_ends_finished_failed_or_silent(tmp_path: Path) -> None:
    folder = make_live_run(tmp_path / "run")
    follower = RunFollower(folder)
    write_status(folder, 120, time.time() - 60)
    assert follower.read().state == "silent"
    (folder / "record.json").write_text(json.dumps({"steps": 120, "accuracy": 0.915}), encoding="utf-8")
    finished = follower.read()
    assert (finished.state, finished.sentence) == ("finished", "Finished after 120 steps, accuracy 91.50%.")
    assert finished.workers == ()
    (folder / "failure.json").write_text(
        json.dumps({"sentence": "Worker 1 was killed.", "noticed_at": time.time()}), encoding="utf-8"
    )
    failed = follower.read()
    assert (failed.state, failed.sentence) == ("failed", "Worker 1 was killed.")
    assert any(said == "Worker 1 was killed." for _, said in failed.events)


def test_strange_files_are_not_waited_for(tmp_path: Path) -> None:
    folder = make_live_run(tmp_path / "run")
    for name in ("record.json", "failure.json", "workers.json", "metrics.jsonl", "job.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    assert RunFollower(folder).read().metrics.losses == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="There is no run folder"):
        RunFollower(tmp_path / "none")


def test_how_jobs_differ(tmp_path: Path) -> None:
    runs = [
        RunFollower(make_live_run(tmp_path / name, seed=seed, epochs=3)).read() for name, seed in (("a", 0), ("b", 1))
    ]
    assert differences(runs) == [("seed", ["0", "1"])]
    assert differences(runs[:1]) == []


def test_the_first_evaluation_stands_between_zero_and_the_last_step(tmp_path: Path) -> None:
    folder = make_live_run(tmp_path / "run")
    follower = RunFollower(folder)
    evaluation = next(plot for plot in live_plots([follower.read()]) if plot.key == "evaluation")
    assert evaluation.figure["layout"]["xaxis"]["range"] == [0, pytest.approx(126)]
    assert evaluation.figure["layout"]["yaxis"]["range"] == [0, pytest.approx(1.001)]
    write_lines(folder, [{"step": 130, "epoch": 2, "train_loss": 0.4, "test_accuracy": 0.93}])
    evaluation = next(plot for plot in live_plots([follower.read()]) if plot.key == "evaluation")
    assert "range" not in evaluation.figure["layout"]["xaxis"]  # two points say where they are


def test_of_runs_with_the_same_values_the_page_says_which_line_covers_which(tmp_path: Path) -> None:
    runs = [RunFollower(make_live_run(tmp_path / name, num_steps=steps)).read() for name, steps in (("a", 9), ("b", 9))]
    captions = {plot.key: plot.caption for plot in live_plots(runs)}
    assert captions["loss"] == "One line a run. b has the values of a and covers its line."
    other = RunFollower(make_live_run(tmp_path / "c", num_steps=12)).read()
    assert live_plots([runs[0], other])[0].caption == "One line a run."


def test_what_a_run_says_is_escaped(tmp_path: Path) -> None:
    folder = make_live_run(tmp_path / "run")
    (folder / "failure.json").write_text(
        json.dumps({"sentence": "<script>alert(1)</script>", "noticed_at": 1.0}), encoding="utf-8"
    )
    run = RunFollower(folder).read()
    assert "<script>alert" not in render_live_page([run])
    assert "<script>alert" not in live_update([run])["parts"]["runs"]
