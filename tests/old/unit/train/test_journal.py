"""The numbers of a run on their way to the log, to every tracker and to the record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from paceline.noise import SmoothedNoise
from paceline.spec import Job, StepTime
from paceline.train.journal import Journal, RunOutput


class Counted(torch.Tensor):
    """Counts how often the CPU reads a number, which on a GPU it would wait for."""

    num_reads: ClassVar[int] = 0

    def __float__(self) -> float:
        Counted.num_reads += 1
        return super().__float__()

    def tolist(self) -> Any:
        Counted.num_reads += 1
        return super().tolist()

    def item(self) -> Any:
        Counted.num_reads += 1
        return super().item()


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value).as_subclass(Counted)


def _lines(folder: Path) -> list[dict[str, float]]:
    """Those of the log but for how fast steps were."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "samples_per_s" not in line]


class FakeRun(SimpleNamespace):
    """A run of one worker whose steps of 10 samples, the last of each epoch 4, are made by hand."""

    def step(self, journal: Journal, index: int) -> None:
        self.steps += 1
        self.samples_seen += 4 if self.steps % 60 == 0 else 10
        self.values = {"margin": _number(index), "gate": _number(-index)}
        self.timer.train_s += 0.5
        journal.step_made(SimpleNamespace(), _number(2.0 * index))  # type: ignore[arg-type]


def _run() -> FakeRun:
    said: list[str] = []
    return FakeRun(
        rank=0,
        world_size=1,
        job=Job(epochs=2),
        notes=[],
        steps=0,
        samples_seen=0,
        timer=SimpleNamespace(train_s=0.0, recent=lambda _num_steps: StepTime()),
        values={},
        keep=lambda *_: None,
        said=said,
        say=said.append,
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
        noise=SmoothedNoise(),
        noise_scale=None,
    )


class Tracked(dict[str, Any]):
    """What a stand-in for a tracker was given, by step."""

    def take(self, values: dict[str, float], step: int) -> None:
        self.setdefault(str(step), {}).update(values)


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tracked]:
    """Stand-ins for wandb and mlflow with the functions that are called, and nothing that needs a network."""
    tracked = {name: Tracked(closed=False) for name in ("wandb", "mlflow")}
    wandb, mlflow = ModuleType("wandb"), ModuleType("mlflow")

    def log(values: dict[str, float], *, step: int) -> None:
        tracked["wandb"].take(values, step)

    def log_metrics(values: dict[str, float], *, step: int) -> None:
        tracked["mlflow"].take(values, step)

    run = SimpleNamespace(log=log, finish=lambda: tracked["wandb"].update(closed=True))
    monkeypatch.setattr(wandb, "init", lambda **_: run, raising=False)
    monkeypatch.setattr(mlflow, "start_run", lambda **_: None, raising=False)
    monkeypatch.setattr(mlflow, "log_metrics", log_metrics, raising=False)
    monkeypatch.setattr(mlflow, "end_run", lambda: tracked["mlflow"].update(closed=True), raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return tracked


def test_values_of_the_loss_function_reach_everything_and_are_read_fifty_steps_at_a_time(
    tmp_path: Path, trackers: dict[str, Tracked]
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = _run()
    output = RunOutput(tmp_path, sys.stderr, ("tensorboard", "wandb", "mlflow"))
    journal = Journal(run, output)  # type: ignore[arg-type]
    Counted.num_reads = 0
    for index in range(1, 61):
        run.step(journal, index)
    # The first loss alone, which tells when the first step was over, then fifty steps together.
    assert Counted.num_reads == 2
    ended: Any = SimpleNamespace(epoch=0, metrics={"accuracy": 0.5}, run=run, is_between_epochs=True)
    journal.epoch_ended(ended)
    assert Counted.num_reads == 3
    (epoch,) = journal.state_dict()["epochs"]
    mean = (10 * sum(range(1, 60)) + 4 * 60) / 594  # weighted by samples
    assert epoch["values"] == pytest.approx({"margin": mean, "gate": -mean})
    assert epoch["train_loss"] == pytest.approx(2 * mean)

    lines = _lines(tmp_path)
    assert [line["step"] for line in lines] == [*range(1, 61), 60]
    assert lines[6] == {"step": 7, "margin": 7.0, "gate": -7.0, "loss": 14.0, "samples_seen": 70}
    assert lines[-1]["train_margin"] == pytest.approx(mean)
    assert lines[-1]["test_accuracy"] == 0.5
    for name in ("wandb", "mlflow"):
        assert trackers[name]["7"] == {"margin": 7.0, "gate": -7.0, "loss": 14.0, "samples_seen": 70}
        assert trackers[name]["60"]["train_gate"] == pytest.approx(-mean)
    for sink in journal._sinks:
        sink.close()
    assert trackers["wandb"]["closed"] and trackers["mlflow"]["closed"]
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("margin")] == [float(step) for step in range(1, 61)]


def test_an_evaluation_between_epochs_is_logged_and_said_at_its_step(tmp_path: Path) -> None:
    run = _run()
    journal = Journal(run, RunOutput(tmp_path, sys.stderr))  # type: ignore[arg-type]
    for index in range(1, 4):
        run.step(journal, index)
    within: Any = SimpleNamespace(is_between_epochs=False)
    journal.evaluated(within, {"accuracy": 0.25, "loss": 1.5})
    lines = _lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert lines[-1] == {"step": 3, "test_accuracy": 0.25, "test_loss": 1.5}
    assert run.said == ["job on 1 worker", "step 3  accuracy 25.00%  loss 1.5000"]
