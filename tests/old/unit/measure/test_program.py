"""The shape that measuring programs share: requests, results, clocks."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.errors import JobError
from paceline.measure.program import Report, run_program
from paceline.measure.stopwatch import Stopwatch, median_s, seconds_of
from paceline.spec.codec import JsonValue
from paceline.spec.comm_timing import CommRequest


@dataclass(frozen=True)
class Question(JsonValue):
    number: int


@dataclass(frozen=True)
class Answer(JsonValue):
    double: int


def _double(question: Question, report: Report) -> Answer | None:
    report("doubling", 0.5)
    return Answer(2 * question.number) if question.number else None


@pytest.mark.parametrize("number", [0, 21])
def test_a_program_reads_its_request_and_leaves_its_result(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, out = tmp_path / "request.json", tmp_path / "not" / "yet"
    request.write_text(json.dumps({"number": number}))
    monkeypatch.setattr(sys, "argv", ["doubling.py", str(request), str(out), "--quiet"])
    run_program("Doubles.", Question, _double, "answer{rank}.json")
    if number:
        assert json.loads((out / "answer0.json").read_text()) == {"double": 42}
    else:
        assert not out.exists()


def test_requests_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    for text, words in (("{", "cannot be read"), ('{"nosuch": 1}', "no key 'nosuch'"), ('{"cases": []}', "cases")):
        path.write_text(text)
        with pytest.raises(JobError, match=words):
            CommRequest.load(path)
    with pytest.raises(JobError, match="cannot be read"):
        CommRequest.load(tmp_path / "nowhere")


def test_medians_leave_out_what_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = iter([100.0, 3.0, 1.0, 2.0])
    now = 0.0

    def act() -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    stopwatch = Stopwatch(150.0)
    assert median_s(act, 3) == 2.0
    assert (stopwatch.spent_s, stopwatch.left_s) == (106.0, 44.0)
    durations = iter([7.0])
    assert seconds_of(act) == 7.0
