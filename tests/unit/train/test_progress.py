"""What a person sees: a live line on a terminal, plain lines now and then in a pipe, nothing elsewhere."""

from __future__ import annotations

import io

import pytest
import torch

from paceline.train import progress
from paceline.train.progress import Progress
from tests.unit.train.clocks import FakeTime


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unreadable(torch.Tensor):
    """A loss that nobody may wait for."""

    def __float__(self) -> float:
        raise AssertionError("the loss was read although no line was due")


UNREADABLE = torch.tensor(0.0).as_subclass(Unreadable)
LOSS = torch.tensor(0.5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(progress, "time", fake)
    return fake


def test_a_terminal_shows_one_line_that_stays_in_its_place(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    screen = Terminal()
    progress = Progress(screen, total_steps=100, label="digits on 2 workers")
    progress.step(1, 0, UNREADABLE, 64)
    assert screen.getvalue() == ""
    clock.pass_by(2.0)
    progress.step(2, 0, LOSS, 64)
    # 128 samples in 2 s, and 98 steps to go at 1 s a step.
    expected = "digits on 2 workers  epoch 1  step 2/100  loss 0.5000  64 samples/s  1:38 left"
    assert screen.getvalue() == f"\r\x1b[2K{expected}"
    progress.step(3, 0, UNREADABLE, 64)
    progress.say("epoch 1/5  train loss 0.4")
    assert screen.getvalue().endswith("\r\x1b[2Kdigits on 2 workers  epoch 1/5  train loss 0.4\n")
    clock.pass_by(7200.0)
    progress.step(4, 1, LOSS, 64)
    assert "epoch 2  step 4/100" in screen.getvalue()
    # 96 steps to go at 7202 s / 4 a step.
    assert screen.getvalue().endswith("  48:00:48 left")
    progress.close()
    assert screen.getvalue().endswith("\r\x1b[2K")


def test_a_narrow_terminal_is_not_overflowed(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    screen = Terminal()
    progress = Progress(screen, 100, "a label of some length")
    clock.pass_by(1.0)
    progress.step(1, 0, LOSS, 64)
    assert len(screen.getvalue().removeprefix("\r\x1b[2K")) == 29


def test_a_pipe_gets_whole_lines_and_few(clock: FakeTime) -> None:
    pipe = io.StringIO()
    progress = Progress(pipe, 1000, "digits")
    for step in range(1, 61):
        clock.pass_by(0.5)  # 30 s in all
        progress.step(step, 0, LOSS, 64)
    progress.say("done")
    progress.close()
    lines = pipe.getvalue().splitlines()
    assert pipe.getvalue().endswith("\n")
    assert "\x1b" not in pipe.getvalue()
    assert "\r" not in pipe.getvalue()
    assert [line.split("  ")[2] for line in lines[:-1]] == ["step 20/1000", "step 40/1000", "step 60/1000"]
    assert lines[-1] == "digits  done"


@pytest.mark.parametrize(
    ("seconds_a_step", "left"),
    [(0.2, "0:01 left"), (10.0, "1:30 left"), (400.0, "1:00:00 left"), (410.0, "1:01:30 left")],
)
def test_time_left(clock: FakeTime, seconds_a_step: float, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    screen = Terminal()
    total = {0.2: 6}.get(seconds_a_step, 10)
    progress = Progress(screen, total, "digits")
    clock.pass_by(seconds_a_step)
    progress.step(1, 0, LOSS, 64)
    assert screen.getvalue().endswith(f"  {left}")


def test_without_a_stream_nothing_is_read_or_said(clock: FakeTime) -> None:
    progress = Progress(None, 10, "digits")
    clock.pass_by(100.0)
    progress.step(1, 0, UNREADABLE, 64)
    progress.say("nothing")
    progress.close()
