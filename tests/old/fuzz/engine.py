"""Runs strategies against targets for a given time, and keeps what went wrong."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from tests.old.fuzz.values import Case

HANG_CPU_S, HANG_WAIT_S = 20, 300
"""Seconds of work, of all threads, and of waiting, after which an input counts as one that never ends: on a busy
machine little work takes long."""
LONGEST_SENTENCE = 1_500


@dataclass(frozen=True)
class Target:
    """Something that takes inputs; it raises `PacelineError` for those that it refuses."""

    name: str
    inputs: st.SearchStrategy[Case]
    take: Callable[[Case], None]


@dataclass
class Findings:
    """What went wrong, once for each place in the program."""

    num_inputs: collections.Counter[str] = field(default_factory=collections.Counter)
    num_refused: int = 0
    tracebacks: dict[str, str] = field(default_factory=dict)
    hangs: dict[str, str] = field(default_factory=dict)
    accepted: dict[str, str] = field(default_factory=dict)

    @property
    def are_none(self) -> bool:
        return not (self.tracebacks or self.hangs or self.accepted)

    def text(self) -> str:
        lines = [
            f"{sum(self.num_inputs.values()):,} inputs, {self.num_refused:,} refused: {len(self.tracebacks)} "
            f"tracebacks, {len(self.hangs)} hangs, {len(self.accepted)} silent acceptances",
            *(f"  {name}: {count:,}" for name, count in sorted(self.num_inputs.items())),
        ]
        for kind, found in (("TRACEBACK", self.tracebacks), ("HANG", self.hangs), ("ACCEPTED", self.accepted)):
            for where, what in found.items():
                lines += ["", f"{kind} {where}", what]
        return "\n".join(lines)


class Hang(BaseException):
    """A target that takes too long."""


def run(targets: Sequence[Target], seconds: float, first_seed: int = 0, batch: int = 100) -> Findings:
    """Give every target inputs in turn until the time is over; once each at least."""
    findings, until, number = Findings(), time.monotonic() + seconds, first_seed
    with in_scratch_folder():
        while True:
            for target in targets:
                _batch(target, findings, number, batch)
                if number > first_seed and time.monotonic() > until:
                    return findings
            number += 1
            if time.monotonic() > until:
                return findings


@contextlib.contextmanager
def in_scratch_folder() -> Iterator[Path]:
    """A new working directory, which is removed."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="paceline-fuzz-") as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def _batch(target: Target, findings: Findings, number: int, size: int) -> None:
    @seed(number)
    @settings(
        max_examples=size,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def one(case: Case) -> None:
        findings.num_inputs[target.name] += 1
        try:
            with _watched(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                target.take(case)
        except PacelineError as refusal:
            findings.num_refused += 1
            if len(str(refusal)) > LONGEST_SENTENCE:
                findings.tracebacks.setdefault(f"{target.name}: a sentence of {len(str(refusal))}", str(refusal)[:500])
        except Hang:
            findings.hangs.setdefault(target.name, f"{_shown(case)}\n{traceback.format_exc(limit=-6)}")
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            ours = [one for one in traceback.extract_tb(error.__traceback__) if "/paceline/" in one.filename]
            place = ours[-1] if ours else place
            where = f"{target.name}: {type(error).__name__} in {place.filename}:{place.lineno}"
            findings.tracebacks.setdefault(where, f"{_shown(case)}\n{traceback.format_exc(limit=-8)[-3000:]}")
        else:
            if case.impossible:
                findings.accepted.setdefault(f"{target.name}: {case.impossible[:100]}", _shown(case))

    one()


def _shown(case: Case) -> str:
    text = repr(case.content)
    return text if len(text) < 600 else f"{text[:300]} … {text[-300:]}"


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise Hang

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, HANG_CPU_S), signal.ITIMER_REAL: (signal.SIGALRM, HANG_WAIT_S)}
    before = {number: signal.signal(number, give_up) for number, _ in timers.values()}
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
