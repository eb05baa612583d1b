"""The functions that start workers, called from Python as a notebook does."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

import paceline
from paceline.errors import JobError, PacelineError, WorkerFailed
from paceline.spec import RunRecord
from tests.old.ranks.command_line import python, succeeded
from tests.old.ranks.forked_commands import in_forked_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # up to five starts of torch in a test

MODULE = """
import torch
from torch.utils.data import TensorDataset

def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))

def data():
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(64, 16, generator=generator), torch.randint(4, (64,), generator=generator)
    return TensorDataset(images, labels), TensorDataset(images[:16], labels[:16])

def broken():
    raise RuntimeError("this model is broken")
"""

SCRIPT = """
import sys, paceline
with paceline.init(global_batch_size=8, seed=0) as run:
    print(f"rank {run.rank} of {run.world_size} with {sys.argv[1:]}")
"""

JOB = paceline.Job(name="mine", global_batch_size=16, virtual_shards=2, epochs=1)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module beside the notebook, written by one of its cells: its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PACELINE_DEVICE", "cpu")
    Path("mine.py").write_text(MODULE, encoding="utf-8")
    return "mine"


def _imported(name: str) -> ModuleType:
    importlib.invalidate_caches()
    return importlib.import_module(name)


@in_forked_process
def test_a_model_and_data_of_a_module_are_trained_on_two_workers(mine: str) -> None:
    module = _imported(mine)
    record = paceline.train(JOB, model=module.model, data=module.data, workers=2, max_steps=3, out="run")
    assert (record.steps, record.world_size, record.job.model.name) == (3, 2, "mine:model")
    assert RunRecord.load(Path("run/record.json")) == record
    assert f"<td>{record.weights_sha256}</td>" in record._repr_html_()
    found = paceline.checkpoint.ls("run")
    assert [one.state for one in found.states] == ["complete"]
    assert paceline.checkpoint.export("run", "model.safetensors").step == 3
    with pytest.raises(PacelineError, match="already holds a finished run"):
        paceline.train(JOB, out="run")


@in_forked_process
def test_a_study_shows_itself(mine: str) -> None:
    module = _imported(mine)
    study = paceline.scale(JOB, model=module.model, data=module.data, devices=[2, 1], max_steps=2, out="study")
    assert [row.devices for row in study.rows] == [1, 2]
    assert "devices" in study._repr_html_() and study._repr_html_().startswith("<pre")
    assert study.page() == Path("study/report.html").read_text(encoding="utf-8")
    assert paceline.report(sorted(Path("study/runs").iterdir())).records == study.records


def test_workers_are_verified(mine: str) -> None:
    module = _imported(mine)
    verdicts = paceline.verify(JOB, model=module.model, data=module.data, workers=[1, 2], steps=2)
    assert [(verdict.workers, verdict.passed) for verdict in verdicts] == [(1, True), (2, True)]


@in_forked_process
def test_a_failing_worker_is_an_exception_with_its_traceback(mine: str) -> None:
    module = _imported(mine)
    with pytest.raises(WorkerFailed) as failed:
        paceline.train(JOB, model=module.broken, data=module.data, workers=2, out="run")
    assert "this model is broken" in failed.value.details
    failures: list[str] = []
    with pytest.raises(WorkerFailed, match="Every run of the study failed"):
        paceline.scale(
            JOB, model=module.broken, data=module.data, devices=[1], out="study",
            on_failure=lambda name, _failure: failures.append(name),
        )  # fmt: skip
    assert failures == ["devices1-seed0"]


@in_forked_process
def test_a_script_is_launched(tmp_path: Path, mine: str) -> None:
    Path("script.py").write_text(SCRIPT, encoding="utf-8")
    folder = paceline.launch("script.py", ["--epochs", "3"], workers=2, out=tmp_path / "logs")
    assert folder == tmp_path / "logs"
    assert "rank 1 of 2 with ['--epochs', '3']" in (folder / "logs" / "rank1.log").read_text()


@in_forked_process
def test_links_and_collectives_are_measured(mine: str) -> None:
    probed = paceline.probe(out="cluster.json", folder="scratch")
    assert probed.timing is None and paceline.Cluster.load(Path("cluster.json")).nodes == probed.measured.nodes
    timings = paceline.bench.comm(workers=2, algorithms=["all_reduce"], max_bytes=16 << 10, rounds=2, out="comm")
    assert {timing.size_bytes for timing in timings.timings} == {4096, 16384}
    assert paceline.bench.comm(draw="comm") == timings
    saves = paceline.bench.checkpoint(workers=2, parameters=1000, rounds=1, out="saves")
    assert saves.world_size == 2


def test_a_model_of_the_notebook_itself_is_one_sentence(mine: str) -> None:
    module = _imported(mine)

    def model() -> None: ...

    for build in (model, lambda: None, module.data()[0]):
        with pytest.raises(JobError) as refused:
            paceline.train(JOB, model=build, workers=2)
        assert "worker processes cannot import it" in str(refused.value) or "not a value of type" in str(refused.value)
        assert str(refused.value).count("\n") == 0
    model.__qualname__, model.__module__ = "model", "__main__"
    with pytest.raises(JobError, match=r"write it to a module \(in a notebook with %%writefile my_module.py\)"):
        paceline.train(JOB, model=model, workers=2)
    with pytest.raises(JobError, match="data should be a function in a module"):
        paceline.train(JOB, data=module.data(), workers=2)


def test_workers_find_a_module_that_lies_beside_the_script(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "beside.py").write_text(MODULE, encoding="utf-8")
    (folder / "begin.py").write_text(
        "import beside, paceline\n"
        "job = paceline.Job(name='mine', global_batch_size=16, virtual_shards=2, epochs=1)\n"
        "job_of = {'model': beside.model, 'data': beside.data}\n"
        "record = paceline.train(job, **job_of, workers=1, max_steps=1, out='run', quiet=True)\n"
        "study = paceline.scale(job, **job_of, devices=[1], max_steps=1, out='study', quiet=True)\n"
        "print(record.job.model.name, len(study.rows))\n",
        encoding="utf-8",
    )
    assert succeeded(python(str(folder / "begin.py"), cwd=tmp_path)).stdout == "beside:model 1\n"
