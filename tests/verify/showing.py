"""What shows that a script is wrong: an error of the run on two workers, or a verdict as `paceline verify` has it.

All that knows how the source says so, and how runs are compared without starting programs, stands in this file."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.errors import PacelineError
from paceline.measure.recorder import RunRecorder
from paceline.train.run import recorded_by
from paceline.verify.comparison import compare
from paceline.verify.records import load
from tests.kit.workers import run_ranks
from tests.verify.scripts import JOB, Cause, Script, train

_STATES_CAUSE: tuple[tuple[str, set[Cause]], ...] = (
    ("the same run twice differs", {Cause.RANDOM}),
    ("of the same samples differs", {*Cause} - {Cause.SAMPLES, Cause.STEPS}),
    ("DIFFERENCE: initial weights", {Cause.WEIGHTS}),
    ("made .* steps, and", {Cause.STEPS}),
    ("DIFFERENCE: samples", {Cause.SAMPLES, Cause.RANDOM}),
    ("read other values|would read other samples|read twice|collate function, called twice", {Cause.SAMPLES}),
    (r"DIFFERENCE: (loss|gradients)|has a hook on its gradient|calls backward\(\) itself", {Cause.GRADIENTS}),
    ("DIFFERENCE: learning rate|different values of|(depends on|grows with) the number of workers", {Cause.RATE}),
    ("DIFFERENCE: update|max_norm", {Cause.UPDATE}),
    ("DIFFERENCE: buffer", {Cause.BUFFERS}),
    ("needs its run.step", {Cause.STEPS}),
)
"""The causes that today's sentences state; of several the first counts."""


@dataclass(frozen=True)
class Outcome:
    """What one worker has at the end."""

    error: str = ""
    """A sentence for the user."""
    crash: str = ""
    """Any other exception."""
    weights: Mapping[str, Any] | None = None
    steps: int = 0
    """The updates that were made."""


@dataclass(frozen=True)
class Shown:
    sentence: str
    """Empty: nothing was shown."""
    weights: tuple[Mapping[str, Any], ...] = ()
    """Of every worker of the three runs, if no error ended them."""

    @property
    def causes(self) -> set[Cause]:
        return next((causes for words, causes in _STATES_CAUSE if re.search(words, self.sentence)), set())


def shown_by(kind: type[Script], case: str, folder: Path) -> Shown:
    """What shows that a script is wrong."""
    found, runs = [], []
    for name, num_workers in ("two", 2), ("one", 1), ("again", 1):
        of_workers = outcomes(kind, case, num_workers, folder / name)
        if errors := {one.error for one in of_workers} - {""}:
            return Shown(" ".join(sorted(errors)))
        assert not any(one.crash for one in of_workers), of_workers
        found += [one.weights for one in of_workers if one.weights is not None]
        runs.append(load(folder / name, num_workers))
    two, one, again = runs
    if not compare(one, again).passed:
        return Shown("the same run twice differs", tuple(found))
    verdict = compare(one, two)
    return Shown("" if verdict.passed else verdict.sentence(), tuple(found))


def outcomes(kind: type[Script], case: str, num_workers: int, folder: Path) -> list[Outcome]:
    """Of each worker; `folder` gets what `paceline verify` compares."""
    job = {name: value(num_workers) if callable(value) else value for name, value in {**JOB, **kind.job}.items()}
    found: list[Outcome] = run_ranks(_outcome, num_workers, kind, case, job, folder)
    return found


def _outcome(kind: type[Script], case: str, job: Mapping[str, Any], folder: Path) -> Outcome:
    os.environ["PACELINE_TRACE_DIR"] = str(folder)
    try:
        with recorded_by(RunRecorder), paceline.init(**job, progress=False) as run:
            return Outcome(weights=train(kind, case, run))
    except PacelineError as problem:
        return Outcome(error=str(problem), steps=run.steps)
    except Exception:
        return Outcome(crash=traceback.format_exc())
