"""What a person sees: a line that stays in its place on a terminal, plain lines now and then in a pipe."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.train.records import progress
from paceline.train.records.progress import Progress
from tests.old.unit.train.clocks import FakeTime


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unreadable(torch.Tensor):
    """A loss that nobody may wait for."""

    def __float__(self) -> float:
        raise AssertionError("the loss was read although no line was due")


def place(steps: int, last_step: int | None = 100, num_epochs: int = 10) -> Any:
    """Where a run of 64 samples a step and 10 steps an epoch is."""
    return SimpleNamespace(
        steps=steps, samples_seen=64 * steps, epoch=(steps - 1) // 10, last_step=last_step, num_epochs=num_epochs
    )


UNREADABLE = torch.tensor(0.0).as_subclass(Unreadable)
LOSS = torch.tensor(0.5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(progress, "time", fake)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return fake


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("wide")
def test_a_terminal_shows_one_line_that_stays_in_its_place(clock: FakeTime) -> None:
    screen = Terminal()
    shown = Progress(screen)
    shown.step(place(1), UNREADABLE)
    assert screen.getvalue() == ""
    clock.pass_by(2.0)
    shown.step(place(3), LOSS)
    # 128 samples in 2 s, and 97 steps to go at 1 s a step.
    assert screen.getvalue() == "\r\x1b[2Kstep 3/100  epoch 1/10  loss 0.5000  64 samples/s  1:37 left\r"
    shown.step(place(4), UNREADABLE)
    shown.say("epoch 1/10  train loss 0.4")
    assert screen.getvalue().endswith("\r\x1b[2Kepoch 1/10  train loss 0.4\n")
    clock.pass_by(7200.0)
    shown.step(place(11), LOSS)
    # 89 steps to go at 7202 s / 10 a step.
    assert screen.getvalue().endswith("\r\x1b[2Kstep 11/100  epoch 2/10  loss 0.5000  0.089 samples/s  17:48:18 left\r")
    shown.close()
    assert screen.getvalue().endswith("\r\x1b[2K")


@pytest.mark.usefixtures("wide")
def test_what_a_script_prints_takes_the_place_of_the_line(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output and error are the same terminal."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    shown = Progress(screen)
    shown.step(place(1), LOSS)
    clock.pass_by(1.0)
    shown.step(place(2), LOSS)
    print("hello")
    print("there", file=sys.stderr)
    clock.pass_by(1.0)
    shown.step(place(3), LOSS)
    shown.close()
    lines = (f"\r\x1b[2Kstep {n}/100  epoch 1/10  loss 0.5000  64 samples/s  1:{40 - n} left\r" for n in (2, 3))
    assert screen.getvalue() == "\r\x1b[2Khello\nthere\n".join(lines) + "\r\x1b[2K"
    assert sys.stdout is screen
    assert sys.stderr is screen


def test_a_narrow_terminal_gets_whole_parts_only(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen = Terminal()
    shown = Progress(screen)
    shown.step(place(1), LOSS)
    clock.pass_by(1.0)
    shown.step(place(2), LOSS)
    assert screen.getvalue() == "\r\x1b[2Kstep 2/100  epoch 1/10  loss 0.5000\r"


def test_a_pipe_gets_whole_lines_and_few(clock: FakeTime) -> None:
    pipe = io.StringIO()
    shown = Progress(pipe)
    for step in range(1, 402):
        shown.step(place(step, last_step=500, num_epochs=50), LOSS)
        clock.pass_by(0.5)  # 200 s in all
    shown.say("done")
    shown.close()
    # Every 10 s in the first minute, every 60 s later.
    assert pipe.getvalue().splitlines() == [
        "step 21/500  epoch 3/50  loss 0.5000  128 samples/s  4:00 left",
        "step 41/500  epoch 5/50  loss 0.5000  128 samples/s  3:50 left",
        "step 61/500  epoch 7/50  loss 0.5000  128 samples/s  3:40 left",
        "step 81/500  epoch 9/50  loss 0.5000  128 samples/s  3:30 left",
        "step 101/500  epoch 11/50  loss 0.5000  128 samples/s  3:20 left",
        "step 121/500  epoch 13/50  loss 0.5000  128 samples/s  3:10 left",
        "step 241/500  epoch 25/50  loss 0.5000  128 samples/s  2:10 left",
        "step 361/500  epoch 37/50  loss 0.5000  128 samples/s  1:10 left",
        "done",
    ]


def test_a_stream_has_no_last_step_and_a_gpu_shows_its_memory(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    pipe = io.StringIO()
    shown = Progress(pipe)
    shown.step(place(1, last_step=None), UNREADABLE)
    clock.pass_by(10.0)
    shown.step(place(11, last_step=None), LOSS)
    assert pipe.getvalue() == "step 11  epoch 2/10  loss 0.5000  64 samples/s  GPU 3.0 GiB\n"
    clock.pass_by(10.0)
    shown.step(place(1_234_567, last_step=123_456_789, num_epochs=100_000), LOSS)
    assert all(len(line) <= 80 for line in pipe.getvalue().splitlines())


def test_a_run_that_was_resumed_counts_its_own_steps(clock: FakeTime) -> None:
    pipe = io.StringIO()
    shown = Progress(pipe)
    shown.step(place(50), UNREADABLE)
    clock.pass_by(10.0)
    shown.step(place(60), LOSS)
    assert pipe.getvalue() == "step 60/100  epoch 6/10  loss 0.5000  64 samples/s  0:40 left\n"


def test_silenced_it_still_gives_messages_and_elsewhere_nothing(clock: FakeTime) -> None:
    pipe = io.StringIO()
    for shown in (Progress(pipe, is_shown=False), Progress(None)):
        shown.step(place(1), UNREADABLE)
        clock.pass_by(100.0)
        shown.step(place(2), UNREADABLE)
        shown.say("a message")
        shown.close()
    assert pipe.getvalue() == "a message\n"
