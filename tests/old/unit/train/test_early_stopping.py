"""Which evaluation is the best, and when there is no use in going on."""

from __future__ import annotations

import math

import pytest

from paceline.errors import JobError
from paceline.spec import EvaluationRecord, Job
from paceline.spec.evaluation import EarlyStoppingSpec, smaller_is_better
from paceline.spec.job import differences
from paceline.train.early_stopping import EarlyStopping, best_evaluation, why_to_stop


def _after(*losses: float, scheduled: bool = True) -> list[EvaluationRecord]:
    return [
        EvaluationRecord(10 * (number + 1), number, {"loss": loss, "accuracy": -loss}, scheduled)
        for number, loss in enumerate(losses)
    ]


def _spec(patience: int, min_change: float = 0.0) -> EarlyStoppingSpec:
    return EarlyStoppingSpec("loss", patience, min_change)


@pytest.mark.parametrize(
    ("losses", "spec", "stops_after"),
    [
        ((3.0, 2.0, 2.0, 2.0, 1.0), _spec(2), 4),  # equal is no better
        ((3.0, 2.0, 2.5, 1.9, 2.0, 1.0), _spec(2), None),  # 1.9 came in time
        ((3.0, 2.95, 2.91, 2.89, 2.8), _spec(2, min_change=0.1), 3),  # less than 0.1 each
        ((3.0, 2.95, 2.89, 2.85, 2.8), _spec(2, min_change=0.1), 5),  # 2.89 is enough, then nothing for two times
        ((math.nan, math.inf, 5.0), _spec(2), 2),
        ((4.0, math.nan, 3.0), _spec(2), None),
        ((5.0, 6.0), _spec(1), 2),
        ((1.0, 2.0, 3.0), EarlyStoppingSpec("accuracy", 1), 2),  # the larger the better
        ((3.0, 2.0, 1.0), EarlyStoppingSpec("loss", 1, mode="max"), 2),
        ((1.0, 1.0, 1.0, 1.0), EarlyStoppingSpec(None, 1), None),
    ],
)
def test_a_run_stops_after_the_first_evaluation_that_uses_up_its_patience(
    losses: tuple[float, ...], spec: EarlyStoppingSpec, stops_after: int | None
) -> None:
    evaluations = _after(*losses)
    found = [number for number in range(len(losses) + 1) if why_to_stop(evaluations[:number], spec) is not None]
    assert (found[0] if found else None) == stops_after


def test_the_reason_names_the_best() -> None:
    reason = "loss has not improved for 2 evaluations; best 2 at step 20"
    assert why_to_stop(_after(3.0, 2.0, 2.0, 2.0), _spec(2)) == reason
    assert why_to_stop(_after(math.nan), _spec(1)) == "loss was not finite in 1 evaluation"


def test_an_evaluation_that_was_made_because_a_run_ended_does_not_count() -> None:
    evaluations = [*_after(3.0, 3.5), *_after(9.0, scheduled=False)]
    assert why_to_stop(evaluations, _spec(2)) is None
    assert why_to_stop([*evaluations, *_after(4.0)], _spec(2)) is not None


def test_the_best_of_equals_is_the_first() -> None:
    best = best_evaluation(_after(2.0, 1.0, math.nan, 1.0, 3.0), "loss", "auto")
    assert best is not None
    assert best.step == 20
    assert best_evaluation(_after(math.nan), "loss", "auto") is None
    assert best_evaluation([], "loss", "auto") is None


def test_which_way_is_better() -> None:
    names = ("loss", "val_loss", "error", "perplexity", "accuracy", "f1")
    assert [smaller_is_better(name, "auto") for name in names] == [True] * 4 + [False] * 2
    assert smaller_is_better("accuracy", "min")
    assert not smaller_is_better("loss", "max")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"early_stopping": {"metric": "f1"}}, "early_stopping.metric = 'f1' is not a metric of the evaluation"),
        ({"checkpoint": {"keep_best": "los"}}, "checkpoint.keep_best = 'los' is not a metric of the evaluation"),
    ],
)
def test_a_metric_that_there_is_not_is_refused_before_training(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        EarlyStopping(Job.from_mapping(values))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"eval_every_steps": 0}, "eval_every_steps = 0 should be at least 1"),
        ({"average_decay": float("nan")}, "average_decay = nan should be a finite number"),
        ({"average_decay": 1.5}, "average_decay = 1.5 should be at most 1"),
        ({"average_decay": 1.0}, "average_decay = 1.0 would keep the first weights"),
        ({"average_decay": 0.9, "aggregation": {"method": "diloco"}}, "average_decay needs aggregation.method"),
        (
            {"eval_every_steps": 5, "aggregation": {"method": "parameter_server_async"}},
            "eval_every_steps needs another aggregation.method",
        ),
        ({"early_stopping": {"patience": 0}}, "early_stopping.patience = 0 should be at least 1"),
        ({"early_stopping": {"min_change": -1.0}}, "early_stopping.min_change = -1.0 should be at least 0"),
        ({"early_stopping": {"min_change": float("inf")}}, "early_stopping.min_change = inf should be a finite"),
        ({"early_stopping": {"mode": "least"}}, "early_stopping.mode = 'least' is not possible"),
        ({"callbacks": [{"options": {}}]}, r"The key 'callbacks\[0\].name' is missing"),
    ],
)
def test_invalid_keys_are_one_sentence(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        Job.from_mapping(values)


def test_more_patience_is_no_other_job_and_another_average_is() -> None:
    before = Job().to_mapping()
    assert not differences(before, Job.from_mapping({"early_stopping": {"metric": "loss"}}).to_mapping())
    assert not differences(before, Job(eval_every_steps=7).to_mapping())
    assert differences(before, Job(average_decay=0.5).to_mapping()) == ["average_decay was None and is 0.5"]


def test_early_stopping_keeps_the_best_checkpoint_by_its_metric() -> None:
    job = Job.from_mapping({"early_stopping": {"metric": "accuracy", "mode": "min"}})
    kept = job.kept_checkpoints
    assert (kept.keep_best, kept.best_mode) == ("accuracy", "min")
    job = job.with_values(checkpoint={"keep_best": "loss"})
    assert job.kept_checkpoints == job.checkpoint
