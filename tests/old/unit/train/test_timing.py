"""Where a step's time goes, on a clock of our own."""

from __future__ import annotations

import pytest

from paceline.spec import StepTime
from paceline.train.records import timing
from paceline.train.records.timing import StepTimer
from tests.old.unit.train.clocks import FakeTime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(timing, "time", fake)
    return fake


def step(timer: StepTimer, clock: FakeTime, data_s: float, compute_s: float, comm_s: float) -> None:
    timer.data_asked()
    clock.pass_by(data_s)
    timer.data_arrived()
    clock.pass_by(compute_s)
    begin = clock.perf_counter()
    clock.pass_by(comm_s)
    timer.step_ended((begin, clock.perf_counter()))


def test_the_parts_of_a_step(clock: FakeTime) -> None:
    timer = StepTimer()
    for _ in range(10):
        step(timer, clock, 0.25, 1.0, 0.5)
    assert timer.median() == StepTime(1.75, 0.25, 1.0, 0.5)
    assert timer.train_s == pytest.approx(17.5)


def test_the_median_ignores_the_first_steps_and_a_hiccup(clock: FakeTime) -> None:
    timer = StepTimer()
    for _ in range(3):
        step(timer, clock, 4.0, 64.0, 8.0)
    for number in range(9):
        step(timer, clock, 0.25, 32.0 if number == 4 else 1.0, 0.5)
    assert timer.median() == StepTime(1.75, 0.25, 1.0, 0.5)
    # All of it took its time, though.
    assert timer.train_s == pytest.approx(3 * 76 + 8 * 1.75 + 32.75)


def test_what_passes_between_epochs_is_no_step(clock: FakeTime) -> None:
    timer = StepTimer()
    for _ in range(6):
        step(timer, clock, 0.0, 1.0, 0.0)
        clock.pass_by(50.0)  # an evaluation
        timer.resume()
    assert timer.median().total_s == pytest.approx(1.0)
    assert timer.train_s == pytest.approx(6.0)


def test_too_few_steps_have_no_median(clock: FakeTime) -> None:
    timer = StepTimer()
    for _ in range(3):
        step(timer, clock, 0.0, 1.0, 0.0)
    assert timer.median() == StepTime()
    assert timer.train_s == pytest.approx(3.0)


def test_the_median_may_be_asked_for_in_between(clock: FakeTime) -> None:
    timer = StepTimer()
    for _ in range(4):
        step(timer, clock, 0.0, 1.0, 0.0)
    assert timer.median().total_s == pytest.approx(1.0)
    for _ in range(4):
        step(timer, clock, 0.0, 3.0, 0.0)
    assert timer.median().total_s == pytest.approx(3.0)


def test_marks_out_of_order_are_no_communication(clock: FakeTime) -> None:
    timer = StepTimer()
    for _ in range(5):
        clock.pass_by(1.0)
        timer.step_ended((clock.perf_counter(), clock.perf_counter() - 1e-3))
    assert timer.median() == StepTime(1.0, 0.0, 1.0, 0.0)


def test_one_step_in_ten_is_beyond_either_end(clock: FakeTime) -> None:
    timer = StepTimer()
    for number in range(3 + 11):
        step(timer, clock, 0.0, float(number), 0.0)
    assert timer.p10_p90() == pytest.approx((4.0, 12.0))  # of 3 to 13
    too_few = StepTimer()
    assert too_few.p10_p90() == (None, None)
