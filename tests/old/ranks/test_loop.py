"""The loop of a `train` job with everything that happens beside the training, on 1, 2 and 3 workers alike."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from paceline import env
from paceline.checkpoint import open_storage
from paceline.checkpoint.load import read_manifest
from paceline.spec import Job, OptimSpec, Plan, RunRecord
from paceline.train import loop
from paceline.train.evaluation.objective import training_loss
from paceline.train.journal import RunOutput
from paceline.train.records.digest import weights_sha256
from tests.kit.workers import run_ranks

CALLBACKS = "tests.old.ranks.loop_callbacks"
EARLY = Job.from_mapping(
    {
        "parity": "bitwise",
        "global_batch_size": 100,
        "epochs": 10,
        "data": {"name": "digits", "train_limit": 400, "test_limit": 60},
        "eval_every_steps": 3,
        "average_decay": 0.5,
        "checkpoint": {"every_minutes": None},
        # Nothing is better by as much as that: the first evaluation stays the best.
        "early_stopping": {"metric": "loss", "patience": 4, "min_change": 100.0},
    }
)
"""Epochs of 4 steps; evaluations after steps 3, 4, 6, 8, 9, ...: stops after step 9."""


def _train(job: Job, folder: Path, max_steps: int | None = None, max_minutes: float | None = None) -> RunRecord:
    plan = Plan(world_size=env.worker_facts().world_size, algorithm="tree_exact", timeout_s=60)
    folder.mkdir(exist_ok=True)
    return loop.train(job, plan, RunOutput(folder, None), max_steps, max_minutes=max_minutes)


def _with_values(optim: OptimSpec) -> Callable[[nn.Module, Any], Any]:
    """The loss of a job with a further number, the mean margin of the right class."""
    loss_fn = training_loss(optim)

    def loss_and_values(model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        return loss_fn(model, batch), {"logit": model(inputs).gather(1, targets[:, None]).mean()}

    return loss_and_values


def _with_callback(name: str, **options: Any) -> Job:
    return EARLY.with_values(callbacks=[{"name": f"{CALLBACKS}:{name}", "options": options}])


def _all(folder: Path) -> list[RunRecord]:
    """Train to the end, stop on request, begin a run, and go on with one that another number of workers began."""
    world_size = env.worker_facts().world_size
    vars(loop)["training_loss"] = _with_values
    recorded = folder / f"events-of-{world_size}"
    recorded.mkdir(exist_ok=True)
    whole = _train(_with_callback("Recorder", folder=str(recorded)), folder / f"whole-{world_size}")
    _train(EARLY, folder / f"parts-{world_size}", max_steps=7)
    begun = folder / f"parts-{world_size - 1}"
    records = [whole, _train(_with_callback("StopOnOne", at_step=2), folder / f"asked-{world_size}")]
    records += [_train(EARLY, folder / f"timed-{world_size}", max_minutes=minutes) for minutes in (1e-6, None)]
    return [*records, _train(EARLY, begun)] if begun.exists() else records


def _learned(record: RunRecord) -> tuple[Any, ...]:
    scheduled = [one for one in record.evaluations if one.is_scheduled]
    return record.steps, record.stopped, record.weights_sha256, scheduled, record.best


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[RunRecord]]]:
    """The folder of all runs, and the records of rank 0 on 1, 2 and 3 workers."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, [run_ranks(_all, world_size, folder, timeout_s=200)[0] for world_size in (1, 2, 3)]


@pytest.mark.timeout(600)
def test_runs_stop_early_at_the_same_step_with_the_same_weights(trained: tuple[Path, list[list[RunRecord]]]) -> None:
    _, records = trained
    alone = records[0][0]
    assert alone.stopped is not None
    assert alone.stopped.startswith("loss has not improved for 4 evaluations; best 2.")
    assert alone.stopped.endswith(" at step 3")
    assert alone.is_complete
    assert [one.step for one in alone.evaluations] == [3, 4, 6, 8, 9]
    assert all(one.is_scheduled for one in alone.evaluations)
    for several in records[1:]:
        assert _learned(several[0]) == _learned(alone)


def test_values_of_the_loss_function_are_the_same_on_any_number_of_workers(
    trained: tuple[Path, list[list[RunRecord]]],
) -> None:
    folder, records = trained
    logged = []
    for world_size, several in enumerate(records, start=1):
        lines = [json.loads(line) for line in (folder / f"whole-{world_size}/metrics.jsonl").read_text().splitlines()]
        logged.append([(line["step"], line["logit"]) for line in lines if "logit" in line])
        assert [sorted(epoch.values) for epoch in several[0].epochs] == [["logit"]] * 3
    assert [step for step, _ in logged[0]] == list(range(1, 10))
    assert logged[0] == logged[1] == logged[2]
    of_epochs = [[epoch.values for epoch in several[0].epochs] for several in records]
    assert of_epochs[0] == of_epochs[1] == of_epochs[2]
    first = logged[0][:4]
    assert of_epochs[0][0]["logit"] == pytest.approx(sum(value for _, value in first) / 4)


def test_a_run_that_was_interrupted_stops_where_it_would_have(trained: tuple[Path, list[list[RunRecord]]]) -> None:
    """Begun on one worker and ended on two, or begun on two and ended on three, in the middle of the patience."""
    _, records = trained
    for several in records[1:]:
        gone_on = several[4]
        assert [(one.step, one.is_scheduled) for one in gone_on.evaluations] == [
            *((3, True), (4, True), (6, True)),
            (7, False),  # because the first part ended there
            *((8, True), (9, True)),
        ]
        assert _learned(gone_on)[:4] == _learned(records[0][0])[:4]


def test_one_worker_may_ask_for_the_end_of_all(trained: tuple[Path, list[list[RunRecord]]]) -> None:
    _, records = trained
    for several in records:
        asked = several[1]
        # They tell each other at the end of step 2, and hear it at the end of step 3.
        assert (asked.steps, asked.stopped) == (3, "asked on the last worker at step 2")
        assert asked.is_complete
        assert asked.evaluations[-1].step == 3


def test_a_run_whose_time_is_over_is_not_complete_and_goes_on(trained: tuple[Path, list[list[RunRecord]]]) -> None:
    _, records = trained
    for several in records:
        timed, gone_on = several[2:4]
        assert (timed.steps, timed.stopped, timed.is_complete) == (2, "max_minutes = 1e-06 are over", False)
        assert timed.evaluations == ()
        assert gone_on.is_complete
        assert _learned(gone_on)[:3] == _learned(records[0][0])[:3]
        assert gone_on.evaluations == records[0][0].evaluations


def test_events_are_the_same_on_all_workers(trained: tuple[Path, list[list[RunRecord]]]) -> None:
    folder, _ = trained
    events = [json.loads(file.read_text()) for file in sorted(folder.glob("events-of-3/*.json"))]
    assert len(events) == 3
    assert events[0] == events[1] == events[2]
    told = [event for event in events[0] if not event[1].startswith("saved")]
    assert told == [
        *([0, "began"], [3, "evaluated"], [4, "evaluated"], [4, "epoch 0"]),
        *([6, "evaluated"], [8, "evaluated"], [8, "epoch 1"], [9, "evaluated"], [9, "epoch 2"], [9, "ended"]),
    ]
    assert any(event[1].startswith("saved") for event in events[0])


def test_the_average_is_what_is_saved_and_the_best_checkpoint_is_named(
    trained: tuple[Path, list[list[RunRecord]]],
) -> None:
    import safetensors.torch

    folder, records = trained
    run_dir = folder / "whole-2"
    saved = safetensors.torch.load_file(run_dir / "model.safetensors")
    assert weights_sha256(saved) == records[1][0].weights_sha256
    storage = open_storage(str(run_dir / "checkpoints"))
    name = storage.read("best").decode().strip()
    best = records[1][0].best
    assert best is not None
    manifest = read_manifest(storage, name)
    assert (manifest.step, manifest.metrics) == (best.step, best.metrics)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("what", ["weights", "learning rates"])
def test_a_callback_that_changes_one_worker_ends_the_run(what: str, tmp_path: Path) -> None:
    job = _with_callback("ChangeOnOne", what=what)
    with pytest.raises(AssertionError, match=f"DivergenceError: Worker 1 has other {what} than rank 0"):
        run_ranks(_train, 2, dataclasses.replace(job, average_decay=None), tmp_path / "run", timeout_s=100)
