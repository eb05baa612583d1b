"""Learning rates are functions of samples seen: the world size and the step count do not appear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Optimizer

from paceline.errors import ModelError
from paceline.spec import Job
from paceline.train.optimizers.schedule import LearningRates, describe_scaling, lr_factor


def _job(**optim: object) -> Job:
    return Job.from_mapping({"global_batch_size": 1024, "epochs": 10, "optim": optim})


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_scaling_rules(rule: str, factor: float) -> None:
    job = _job(base_batch_size=256, lr_scaling=rule)
    assert job.lr_scale == factor
    assert (describe_scaling(job) is None) == (factor == 1.0)


def test_no_stated_base_no_scaling() -> None:
    assert Job(global_batch_size=10**6).lr_scale == 1.0


def test_warmup_starts_at_the_unscaled_rate_and_ends_at_the_scaled() -> None:
    job = _job(base_batch_size=256, warmup_epochs=2.0)
    first = lr_factor(job, 0, 10_000)
    assert 1.0 < first < 1.5
    assert lr_factor(job, 20_000, 10_000) == 4.0


@given(st.integers(0, 99_000))
def test_warmup_never_falls_and_cosine_never_rises(samples: int) -> None:
    warm, cosine = _job(warmup_epochs=3.0), _job(schedule="cosine")
    assert lr_factor(warm, samples, 10_000) <= lr_factor(warm, samples + 1000, 10_000)
    assert lr_factor(cosine, samples, 10_000) >= lr_factor(cosine, samples + 1000, 10_000)
    assert 0 < lr_factor(warm, samples, 10_000) <= 1


def test_lines_cosines_and_steps_hit_their_marks() -> None:
    line = _job(schedule="linear")
    assert [lr_factor(line, seen, 1000) for seen in (0, 2500, 10_000)] == pytest.approx([1.0, 0.75, 0.0])
    cosine = _job(schedule="cosine")
    assert lr_factor(cosine, 0, 1000) == 1.0
    assert lr_factor(cosine, 5000, 1000) == pytest.approx(0.5)
    assert lr_factor(cosine, 10_000, 1000) == pytest.approx(0.0)
    step = _job(schedule="step", step_epochs=[2, 4], step_factor=0.1)
    assert [lr_factor(step, s, 1000) for s in (0, 1999, 2000, 4000)] == pytest.approx([1, 1, 0.1, 0.01])


def test_an_optimizer_whose_groups_have_no_learning_rate_is_refused() -> None:
    class Around(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    said = r"Around\.param_groups have no 'lr'.* self\.param_groups = inner\.param_groups"
    with pytest.raises(ModelError, match=said):
        LearningRates(Job(), Around(SGD(nn.Linear(2, 2).parameters(), lr=0.1)))


def test_an_optimizer_that_finds_its_learning_rate_itself_has_no_schedule() -> None:
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    rates = LearningRates(Job(), optimizer)
    with rates.at_base():
        rates.set(10, 100)
    assert optimizer.param_groups[0]["lr"] is None
    with pytest.raises(ModelError, match=r"SGD finds its learning rate itself"):
        LearningRates(_job(schedule="cosine"), optimizer)
