"""The folder of a run: no run is ever written over another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import paceline
from paceline.errors import JobError, LaunchError, PacelineError
from paceline.folder_lock import hold_folder
from paceline.spec import Job, Plan, RunRecord
from paceline.spec.plan import RunLimit
from paceline.workflows.bench import results_folder
from paceline.workflows.run_folder import (
    begun_with,
    finished_record,
    finished_run,
    new_run_dir,
    put_record_aside,
    write_run,
)
from tests.old.sample_records import sample_record


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_new_folders_differ_even_within_a_second() -> None:
    folders = [new_run_dir(None, "digits") for _ in range(3)]
    assert len(set(folders)) == 3
    for folder in folders:
        assert folder.is_dir()
        assert folder.parent == Path("runs")
        assert folder.name.startswith("digits-")
        assert folder.stat().st_mode & 0o077 == 0  # a run may hold what only its owner should see


def test_results_are_never_lost(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    assert results_folder(out, "digits") == out
    out.mkdir()
    (out / "job.json").write_text("{}")  # begun and given up: may be begun again
    assert results_folder(out, "digits") == out
    for file, what in (("record.json", "finished run"), ("timings.json", "benchmark")):
        (out / file).write_text("{}")
        with pytest.raises(PacelineError, match=f"already holds a {what}; name another folder"):
            results_folder(out, "digits")
        (out / file).unlink()


def test_a_run_in_the_precision_that_was_left_to_it_is_finished(tmp_path: Path) -> None:
    record = sample_record()
    decided = dataclasses.replace(record.job, precision="bfloat16")
    write_run(decided, record.plan, tmp_path)
    dataclasses.replace(record, job=decided).save(tmp_path / "record.json")
    left_to_it = dataclasses.replace(decided, precision="auto")
    assert finished_run(tmp_path, left_to_it, None, force=False) is not None
    with pytest.raises(PacelineError, match="precision was 'bfloat16' and is 'float32'"):
        finished_run(tmp_path, dataclasses.replace(decided, precision="float32"), None, force=False)


def test_results_in_a_folder_that_was_deleted_during_the_run_are_no_obstacle(tmp_path: Path) -> None:
    record = sample_record()
    record.save(tmp_path / "record.json")
    assert finished_run(tmp_path, record.job, None, force=False) is None
    put_record_aside(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"record-{record.steps}-steps.json"]


def test_a_record_of_another_node_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = sample_record()
    monkeypatch.setattr("time.sleep", lambda _s: record.save(tmp_path / "record.json"))
    assert finished_record(tmp_path, 0.0, was_elsewhere=True).weights_sha256 == record.weights_sha256


def test_a_record_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"The run has ended well, but its record .* is gone"):
        finished_record(tmp_path, 0.0, was_elsewhere=False)


def test_a_folder_that_is_deleted_once_its_record_was_read_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_record().save(tmp_path / "record.json")

    def delete(_record: RunRecord, file: Path, _mode: int) -> None:
        file.unlink()
        raise FileNotFoundError(file)

    monkeypatch.setattr(RunRecord, "save", delete)
    with pytest.raises(PacelineError, match=r"The run has ended well, but its record .* is gone"):
        finished_record(tmp_path, 0.0, was_elsewhere=False)


def test_a_second_start_in_a_folder_changes_nothing_there(tmp_path: Path) -> None:
    """The first one is about to end: its record is there, and it will look for it."""
    record = sample_record()
    write_run(record.job, record.plan, tmp_path, RunLimit(record.steps))
    record.save(tmp_path / "record.json")
    with hold_folder(tmp_path):
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(LaunchError, match="is in use by process"):
            paceline.train(record.job.with_values(epochs=record.job.epochs + 1), out=tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_run_lies_ready_as_files(tmp_path: Path) -> None:
    job, plan = Job(name="digits", epochs=3), Plan(world_size=2)
    program = write_run(
        job, plan, tmp_path / "deep" / "run", RunLimit(7), quiet=True, trackers=["tensorboard"], force=True
    )
    run_dir = tmp_path / "deep" / "run"
    assert begun_with(run_dir) == (job, plan, 7)
    assert program == [
        *("-m", "paceline.train", str(run_dir)),
        *("--quiet", "--force", "--track", "tensorboard"),
    ]


def test_a_run_without_a_limit_says_so(tmp_path: Path) -> None:
    write_run(Job(), Plan(), tmp_path / "run")
    assert begun_with(tmp_path / "run") == (Job(), Plan(), None)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PacelineError, match=r"run folder .*file/run cannot be made"):
        write_run(Job(), Plan(), tmp_path / "file" / "run")


def test_a_finished_run_that_is_longer_is_refused_as_that(tmp_path: Path) -> None:
    record = sample_record()
    record.save(tmp_path / "record.json")
    sentence = "finished run that is longer: it has made 276 steps of 12 epochs, and max_steps = 20 here; name another"
    for force in (False, True):
        with pytest.raises(PacelineError, match=sentence):
            finished_run(tmp_path, record.job, 20, force=force)
    with pytest.raises(PacelineError, match="276 steps of 12 epochs, and epochs = 3 here"):
        finished_run(tmp_path, dataclasses.replace(record.job, epochs=3), None, force=False)


def test_a_study_with_other_runs_is_not_replaced(tmp_path: Path) -> None:
    record = sample_record(2)
    for name in ("devices2-seed0", "devices4-seed0"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        record.save(tmp_path / "runs" / name / "record.json")
    (tmp_path / "scaling.json").write_text("mine")
    with pytest.raises(JobError, match="holds a study with devices2-seed0 and 1 more, which this one would leave out"):
        paceline.scale("digits-lenet", devices=[1], max_steps=4, out=tmp_path)
    with pytest.raises(JobError, match="holds a study with devices4-seed0, which this one would leave out"):
        paceline.scale("digits-lenet", devices=[1, 2], max_steps=4, out=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "scaling.json"]


def test_a_run_of_a_study_says_what_differs(tmp_path: Path) -> None:
    record, run_dir = sample_record(), tmp_path / "runs" / "devices1-seed0"
    write_run(record.job, record.plan, run_dir, RunLimit(4))
    record.save(run_dir / "record.json")
    with pytest.raises(JobError, match=r"devices1-seed0 holds another run \(max_steps was 4 and is 2.*\); name"):
        paceline.scale(record.job, devices=[1], max_steps=2, out=tmp_path)
