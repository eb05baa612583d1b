"""A study goes on after a run that failed, and with the runs that it has; what launches workers is played."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

import paceline
from paceline.errors import PacelineError, WorkerFailed
from paceline.launch.run import LaunchOptions
from paceline.spec import Cluster, Device, Job, Node, Plan, RunRecord
from paceline.workflows.where import Allocation

JOB = "digits-lenet"
RECORDED = Path(__file__).parents[2] / "golden" / "inputs" / "study" / "1-devices-seed-0" / "record.json"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that were launched; those on two devices fail the first time."""
    names: list[str] = []

    def run(_self: Allocation, plan: Plan, _program: Sequence[str], options: LaunchOptions) -> None:
        names.append(options.run_dir.name)
        if plan.world_size == 2 and names.count(options.run_dir.name) == 1:
            raise WorkerFailed("Rank 1 of 2 fell over.", details="its traceback")
        job = Job.load(options.run_dir / "job.json")
        record = dataclasses.replace(RunRecord.load(RECORDED), job=job, plan=plan, steps=3)
        record.save(options.run_dir / "record.json")

    monkeypatch.setattr(Allocation, "run", run)
    return names


def test_a_failed_run_is_told_at_the_end_and_made_again_alone(tmp_path: Path, launched: list[str]) -> None:
    told: list[str] = []
    study = {"devices": [1, 2], "seeds": 2, "max_steps": 3, "out": tmp_path / "study"}
    with pytest.raises(WorkerFailed) as caught:
        paceline.scale(JOB, say=told.append, **study)  # type: ignore[arg-type]
    assert "2 of 4 runs failed: devices2-seed0: Rank 1 of 2 fell over" in str(caught.value)
    assert caught.value.details == "its traceback"
    assert told == ["devices2-seed0: Rank 1 of 2 fell over.", "devices2-seed1: Rank 1 of 2 fell over."]
    assert launched == ["devices1-seed0", "devices2-seed0", "devices1-seed1", "devices2-seed1"]
    assert (tmp_path / "study" / "scaling.json").exists()
    del launched[0], launched[1]
    found = paceline.scale(JOB, **study)  # type: ignore[arg-type]
    assert launched[2:] == ["devices2-seed0", "devices2-seed1"]
    assert [row.devices for row in found.rows] == [1, 2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_steps": 2}, ["longer, of 3 steps"]),
        ({"settings": ["plan.timeout_s=60"]}, ["timeout_s was 600.0 and is 60.0"]),
        ({"settings": ["optim.lr=0.5"]}, ["optim.lr"]),
    ],
)
def test_runs_of_another_study_are_not_mixed_in(
    tmp_path: Path, launched: list[str], change: dict[str, object], words: list[str]
) -> None:
    study: dict[str, object] = {"devices": [1, 2], "max_steps": 3, "out": tmp_path / "study"}
    for _ in range(2):
        with contextlib.suppress(WorkerFailed):
            paceline.scale(JOB, **study)  # type: ignore[arg-type]
    with pytest.raises(PacelineError) as caught:
        paceline.scale(JOB, **study | change)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_more_counts_go_on_with_a_study_of_gpus(
    tmp_path: Path, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tuple(Device("cuda", index, "H100", 80 << 30) for index in range(4))
    here = Cluster((Node("gpu1", 32, 1 << 40, "", devices),))
    monkeypatch.setattr("paceline.workflows.where.detect", lambda: here)
    study: dict[str, object] = {"max_steps": 3, "out": tmp_path / "study"}
    paceline.scale(JOB, devices=[1], **study)  # type: ignore[arg-type]
    paceline.scale(JOB, devices=[1, 4], **study)  # type: ignore[arg-type]
    assert launched == ["devices1-seed0", "devices4-seed0"]


def test_the_runs_of_a_study_share_no_folder_of_checkpoints(tmp_path: Path, launched: list[str]) -> None:
    settings = [f"checkpoint.dir={tmp_path}/kept"]
    study = paceline.scale(JOB, devices=[1, 3], max_steps=3, settings=settings, out=tmp_path / "study")
    assert [run.job.checkpoint.dir for run in study.records] == [f"{tmp_path}/kept/{name}" for name in launched]
