"""What a run says and writes of itself: a line of numbers for each step and evaluation, the table at its end, the
noise scale of its gradients, and when there is no use in going on."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import JobError, PacelineError
from paceline.spec import Job, RunRecord
from paceline.spec.job import EarlyStoppingSpec
from paceline.spec.record import EvaluationRecord, best_place
from paceline.train import loop
from paceline.train.callbacks import best_evaluation, stop_reason

# --- early stopping ---


def evaluations(*losses: float, scheduled: bool = True) -> list[EvaluationRecord]:
    return [
        EvaluationRecord(10 * (number + 1), number, {"loss": loss, "accuracy": -loss}, scheduled)
        for number, loss in enumerate(losses)
    ]


def patience(count: int, min_change: float = 0.0) -> EarlyStoppingSpec:
    return EarlyStoppingSpec("loss", count, min_change)


@pytest.mark.parametrize(
    ("losses", "spec", "stops_after"),
    [
        ((3.0, 2.0, 2.0, 2.0, 1.0), patience(2), 4),  # equal is no better
        ((3.0, 2.0, 2.5, 1.9, 2.0, 1.0), patience(2), None),  # 1.9 came in time
        ((3.0, 2.95, 2.91, 2.89, 2.8), patience(2, min_change=0.1), 3),  # less than 0.1 each
        ((3.0, 2.95, 2.89, 2.85, 2.8), patience(2, min_change=0.1), 5),  # 2.89 is enough, then nothing for two times
        ((math.nan, math.inf, 5.0), patience(2), 2),
        ((4.0, math.nan, 3.0), patience(2), None),
        ((5.0, 6.0), patience(1), 2),
        ((1.0, 2.0, 3.0), EarlyStoppingSpec("accuracy", 1), 2),  # the larger the better
        ((3.0, 2.0, 1.0), EarlyStoppingSpec("loss", 1, mode="max"), 2),
        ((1.0, 1.0, 1.0, 1.0), EarlyStoppingSpec(None, 1), None),
    ],
)
def test_a_run_stops_after_the_evaluation_that_uses_up_its_patience(
    losses: tuple[float, ...], spec: EarlyStoppingSpec, stops_after: int | None
) -> None:
    records = evaluations(*losses)
    found = [number for number in range(len(losses) + 1) if stop_reason(records[:number], spec) is not None]
    assert (found[0] if found else None) == stops_after


def test_the_reason_names_the_metric_and_the_best() -> None:
    reason = stop_reason(evaluations(3.0, 2.0, 2.0, 2.0), patience(2))
    assert reason is not None and all(word in reason for word in ("loss", "2 evaluations", "step 20"))
    reason = stop_reason(evaluations(math.nan), patience(1))
    assert reason is not None and "finite" in reason


def test_an_evaluation_at_the_end_of_a_run_does_not_count() -> None:
    records = [*evaluations(3.0, 3.5), *evaluations(9.0, scheduled=False)]
    assert stop_reason(records, patience(2)) is None
    assert stop_reason([*records, *evaluations(4.0)], patience(2)) is not None


def test_the_best_of_equals_is_the_first_and_a_name_tells_which_way_is_better() -> None:
    best = best_evaluation(evaluations(2.0, 1.0, math.nan, 1.0, 3.0), "loss", "auto")
    assert best is not None and best.step == 20
    assert best_evaluation(evaluations(math.nan), "loss", "auto") is None
    names = ("loss", "val_loss", "error", "perplexity", "accuracy", "f1")
    assert [best_place([1.0, 2.0], name, "auto") for name in names] == [0] * 4 + [1] * 2
    assert best_place([1.0, 2.0], "accuracy", "min") == 0 and best_place([1.0, 2.0], "loss", "max") == 1


# --- what a run writes ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRecord, list[str]]:
    """A recipe trained for three epochs of five steps on one worker: its folder, its record, and what was said."""
    folder = tmp_path_factory.mktemp("run") / "one"
    said: list[str] = []
    settings = ["epochs=3", "global_batch_size=32", "data.train_limit=150", "data.test_limit=50", "optim.lr=0.02"]
    record: Any = paceline.train(
        "digits-lenet", workers=1, out=folder, settings=settings, track=["tensorboard"], say=said.append
    )
    return folder, RunRecord.load(folder / "record.json") if not isinstance(record, RunRecord) else record, said


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_step_and_each_evaluation_has_its_line_of_numbers(trained: tuple[Path, RunRecord, list[str]]) -> None:
    folder, record, _ = trained
    steps = [line for line in lines_of(folder) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 16))
    seen = [32 * step for step in range(1, 5)] + [150]
    assert [line["samples_seen"] for line in steps] == [150 * epoch + one for epoch in range(3) for one in seen]
    evaluated = [line for line in lines_of(folder) if "test_accuracy" in line]
    assert [line["step"] for line in evaluated] == [5, 10, 15]
    for line, epoch in zip(evaluated, record.epochs, strict=True):
        assert line["test_accuracy"] == epoch.metrics["accuracy"]
        of_epoch = steps[line["step"] - 5 : line["step"]]
        weights = [32, 32, 32, 32, 22]
        mean = sum(weight * one["loss"] for weight, one in zip(weights, of_epoch, strict=True)) / 150
        assert epoch.train_loss == pytest.approx(mean, rel=1e-5)


def test_the_record_tells_what_was_trained_and_comes_back_from_its_file(
    trained: tuple[Path, RunRecord, list[str]],
) -> None:
    folder, record, _ = trained
    assert (record.steps, record.samples_seen, record.world_size) == (15, 450, 1)
    assert record.job.epochs == 3 and len(record.weights_sha256) == 64
    assert RunRecord.load(folder / "record.json") == record


def test_tensorboard_gets_the_same_numbers(trained: tuple[Path, RunRecord, list[str]]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder, _, _ = trained
    events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    losses = [line["loss"] for line in lines_of(folder) if "loss" in line]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses, rel=1e-6)
    assert [event.step for event in events.Scalars("test_accuracy")] == [5, 10, 15]


def test_a_tracker_that_is_none_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"tensorbord.*tensorboard"):
        paceline.train("digits-lenet", out=tmp_path / "run", track=["tensorbord"])  # type: ignore[list-item]
    assert not (tmp_path / "run").exists()


# --- what a run says ---


def train(progress: io.StringIO | bool, *, after_step: Callable[[paceline.Run], None] | None = None, **job: Any) -> int:
    """Two epochs of five steps, evaluated at the end; the number of steps."""
    samples = TensorDataset(torch.linspace(-1, 1, 18)[:, None])
    with paceline.init(global_batch_size=4, virtual_shards=2, epochs=2, progress=progress, **job) as run:
        model = nn.Linear(1, 1)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(samples):
            run.step(batch, lambda model, shard: model(shard[0]).square().mean())
            if after_step is not None:
                after_step(run)
        run.evaluate(samples, lambda _, batch: {"accuracy": (batch[0][:, 0] > 0).double()})
        return run.steps


def test_the_table_at_the_end_has_the_facts_and_fits_a_terminal(tmp_path: Path) -> None:
    screen = io.StringIO()
    folder = tmp_path / ("a folder with spaces " * 3).strip() / "checkpoints"
    train(screen, checkpoint_dir=folder)
    lines = screen.getvalue().splitlines()
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert "10" in rows["steps"] and "2 epochs" in rows["steps"] and "36 samples" in rows["steps"]
    assert "1 worker" in rows["workers"] and "cpu" in rows["workers"]
    assert "accuracy 50.00%" in rows["evaluated"]
    assert "samples/s" in rows["speed"]
    assert "waiting for others" not in rows["time"]  # there are none
    assert f"{folder}/step-00000010" in rows["checkpoint"]
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80


def test_a_run_that_ended_in_the_middle_of_an_epoch_says_so() -> None:
    screen = io.StringIO()
    train(screen, max_steps=7)
    (row,) = [line for line in screen.getvalue().splitlines() if line.startswith("steps")]
    assert "7" in row and "epoch 2 of 2" in row


def test_a_run_that_goes_on_in_another_dtype_says_so(tmp_path: Path) -> None:
    samples, notes = TensorDataset(torch.ones(8, 1)), []
    for num_steps, dtype in enumerate((torch.float32, torch.float32, torch.bfloat16), start=1):
        with paceline.init(
            global_batch_size=4,
            epochs=2,
            virtual_shards=2,
            max_steps=num_steps,
            checkpoint_dir=tmp_path,
            progress=False,
        ) as run:
            model = nn.Linear(1, 1, dtype=dtype)
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.batches(samples):
                run.step(batch, lambda model, shard: model(shard[0].to(model.weight.dtype)).float().square().mean())
        notes.append(" ".join(run.notes))
    assert "converted" not in notes[1]
    assert "'weight' as torch.float32, and the model as torch.bfloat16" in notes[2]


def test_a_run_that_goes_on_in_float16_scales_its_loss_anew(tmp_path: Path) -> None:
    for num_steps, precision in enumerate(("float32", "float16"), start=1):
        job = Job(global_batch_size=4, virtual_shards=2, precision=precision)  # type: ignore[arg-type]
        with paceline.init(job, max_steps=num_steps, checkpoint_dir=tmp_path, force=True, progress=False) as run:
            run.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.batches(TensorDataset(torch.ones(8, 1))):
                run.step(batch, lambda model, shard: model(shard[0]).square().mean())
        assert run.steps == num_steps


def test_the_record_of_an_epoch_in_two_parts_is_that_of_a_whole_one(tmp_path: Path) -> None:
    data = {"name": "digits", "train_limit": 80, "test_limit": 8}
    job = Job.from_mapping({"model": "mlp", "data": data, "global_batch_size": 16, "virtual_shards": 2, "epochs": 2})
    whole = loop.train(job, None, tmp_path / "whole", quiet=True)
    loop.train(job, None, tmp_path / "parts", max_steps=7, quiet=True)
    parts = loop.train(job, None, tmp_path / "parts", quiet=True)
    assert [one.train_loss for one in parts.epochs] == pytest.approx([one.train_loss for one in whole.epochs])


def test_a_run_that_is_stopped_ends_one_step_later_and_says_why() -> None:
    screen = io.StringIO()
    assert train(screen, after_step=lambda run: run.stop("it is good enough") if run.steps == 3 else None) == 4
    assert "it is good enough" in screen.getvalue()


def test_a_silent_run_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    train(False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.budget(processor_s=8)
def test_a_metric_that_is_not_evaluated_is_refused_before_training() -> None:
    job = Job.from_mapping({"name": "digits-lenet", "early_stopping": {"metric": "f1"}})
    with pytest.raises(PacelineError, match=r"'f1'.*accuracy"):
        paceline.train(job, workers=1, quiet=True)
