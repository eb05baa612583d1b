"""`paceline verify` of scripts that know nothing of Paceline: a right one is equal, of a wrong one the first difference
and its cause are named. Runs are made here without starting programs; `test_command` has the command."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.verify.comparison import ParityVerdict, compare
from paceline.verify.observe import Observer
from paceline.verify.records import ObservedRun, load
from tests.kit.workers import run_ranks
from tests.verify.plain import Expected, Libraries, PlainScript, Right, Wrong
from tests.verify.scripts import cases_of

pytestmark = pytest.mark.nightly  # each case starts three workers
NUM_STEPS = 3


def _observe(kind: type[PlainScript], case: str, folder: Path, port: int, without_expected: bool) -> None:
    """Ends this process, as where the observer is started by its command."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    observer = Observer(folder / f"rank{rank}.jsonl", NUM_STEPS, num_workers, without_expected=without_expected)
    observer.begin()
    with observer:
        script = kind()
        getattr(script, case)()
        script.train()


def _run(kind: type[PlainScript], case: str, folder: Path, num_workers: int, **flags: bool) -> ObservedRun:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = kind, case, folder, port, flags.get("without_expected", False)
    run_ranks(_observe, num_workers, *arguments, timeout_s=90, may_die=range(num_workers))
    return load(folder, num_workers)


def _verdict(kind: type[PlainScript], case: str, folder: Path, **flags: bool) -> tuple[ParityVerdict, bool]:
    one, two = (_run(kind, case, folder / str(number), number, **flags) for number in (1, 2))
    return compare(one, two)


@pytest.mark.parametrize("case", cases_of(Right))
def test_a_right_script_is_equal(case: str, tmp_path: Path) -> None:
    verdict, _ = _verdict(Right, case, tmp_path)
    assert verdict.passed and verdict.steps == NUM_STEPS and verdict.largest_difference < 1e-12, verdict


@pytest.mark.budget(processor_s=30)
@pytest.mark.parametrize("case", cases_of(Libraries))
def test_a_right_script_of_a_library_is_equal(case: str, tmp_path: Path) -> None:
    verdict, _ = _verdict(Libraries, case, tmp_path)
    assert verdict.passed and verdict.steps == NUM_STEPS and verdict.largest_difference < 1e-12, verdict


@pytest.mark.parametrize("case", cases_of(Expected))
def test_what_is_to_be_expected_is_told_from_what_lies_behind(case: str, tmp_path: Path) -> None:
    verdict, is_expected = _verdict(Expected, case, tmp_path / "with")
    assert verdict.outcome == "differs" and is_expected and case.replace("_", " ") in verdict.cause
    behind, _ = _verdict(Expected, case, tmp_path / "without", without_expected=True)
    assert behind.passed, behind


@pytest.mark.parametrize("case", cases_of(Wrong))
def test_the_cause_of_a_mistake_is_named(case: str, tmp_path: Path) -> None:
    verdict, _ = _verdict(Wrong, case, tmp_path)
    said: Any = f"{verdict.where}: {verdict.cause}; {verdict.advice}"
    where, words = (getattr(Wrong, case).__doc__ or "").split(": ", 1)
    assert re.match(where, said) and re.search(words, said), said
