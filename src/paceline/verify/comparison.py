"""The first difference between two runs that should have computed the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.step_records import Fingerprints, StepRecord
from paceline.verify import causes
from paceline.verify.causes import Cause
from paceline.verify.records import ObservedRun, distances, farthest, unlike_rank_0
from paceline.words import number_of

# Above the rounding of a few steps, far below what a wrong mean or a lost sample does.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
_NEGLIGIBLE = 1e-5
"""A gradient this much smaller than all of them together is rounding, which Adam makes as large as any other."""


@dataclass(frozen=True)
class ParityVerdict:
    """Whether a run computed what the one on the smallest number of workers did, or what differs first, and why."""

    workers: int
    outcome: Literal["equal", "differs", "could not tell"]
    steps: int
    largest_difference: float = 0.0
    """Of gradients and weights up to the first difference, relative to their size."""
    step: int | None = None
    """From 1."""
    where: str = ""
    """What differs: "initial weights", "samples", "gradient", "learning rate" …"""
    tensor: str = ""
    ranks: tuple[int, ...] = ()
    """Those that differ from rank 0; empty where all agree with each other."""
    cause: str = ""
    advice: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return self.outcome == "equal"

    def sentence(self) -> str:
        """The verdict on a few lines."""
        who = number_of(self.workers, "worker")
        if self.outcome == "equal":
            how = "bit for bit" if self.largest_difference == 0 else f"to {self.largest_difference:.0e}"
            lines = [f"EQUAL    {who}: {number_of(self.steps, 'step')}, {how}"]
        elif self.outcome == "differs":
            ranks = f", rank {', '.join(map(str, self.ranks))} from rank 0" if self.ranks else ""
            tensor = f" of '{self.tensor}'" if self.tensor else ""
            size = f" by {self.largest_difference:.1e}" if self.largest_difference else ""
            place = f"FIRST DIFFERENCE: {self.where}{tensor} in step {self.step}{size}{ranks}"
            lines = [f"DIFFERS  {who}. {place}", f"  why: {self.cause}", f"  do:  {self.advice}"]
        else:
            lines = [f"UNKNOWN  {who}: {self.cause}", f"  do:  {self.advice}"]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class Difference:
    where: str
    cause: Cause
    tensor: str = ""
    size: float = 0.0
    ranks: tuple[int, ...] = ()


def compare(base: ObservedRun, other: ObservedRun) -> tuple[ParityVerdict, bool]:
    """The verdict on `other`, and whether what differs is to be expected of workers that have samples of their own."""
    num_steps = min(len(base.steps), len(other.steps))
    tolerance = max(TOLERANCE[one.precision] for one in (base, other))
    if base.is_bitwise and base.tp == other.tp:
        tolerance = 0.0
    largest = 0.0
    for step in range(num_steps):
        for difference in _looks(_Step(base, other, step, tolerance)):
            if isinstance(difference, float):
                largest = max(largest, difference)
                continue
            verdict = ParityVerdict(
                other.num_workers, "differs", num_steps, difference.size, step + 1, difference.where,
                difference.tensor, difference.ranks, difference.cause.why, difference.cause.advice,
            )  # fmt: skip
            return verdict, difference.cause.is_expected
    verdict = ParityVerdict(other.num_workers, "equal", num_steps, largest, notes=tuple(_notes(base, other)))
    if len({*base.num_steps, *other.num_steps}) > 1:
        cause = causes.other_numbers_of_steps(base, other)
        return replace(verdict, outcome="differs", step=num_steps + 1, where="number of steps", cause=cause.why,
                       advice=cause.advice), False  # fmt: skip
    return verdict, False


def _notes(base: ObservedRun, other: ObservedRun) -> Iterator[str]:
    if not any(base.samples(step) for step in range(len(base.steps))):
        yield "samples were not seen, so they were not compared."
    elif other.num_workers > 1 and other.tp == 1 and causes.share_all_samples(other, 0):
        yield "every rank computed all samples; that is right where ranks divide the model, and else a waste."
    if base.is_bitwise and base.tp != other.tp:
        yield "layers that are divided (tp) add in another order, so this was compared up to rounding."


@dataclass(frozen=True)
class _Step:
    """A step of both runs."""

    base: ObservedRun
    other: ObservedRun
    number: int
    tolerance: float

    @property
    def mine(self) -> StepRecord:
        return self.base.steps[self.number][0]

    @property
    def theirs(self) -> Sequence[StepRecord]:
        return self.other.steps[self.number]


def _looks(step: _Step) -> Iterator[Difference | float]:
    """What differs in a step, in the order in which one thing follows from another; the sizes of what does not."""
    base, other, number = step.base, step.other, step.number
    where, cause_of = (
        ("weight before the step", causes.of_weights_before)
        if number
        else ("initial weights", causes.of_initial_weights)
    )
    yield from _tensors(step, where, lambda one: one.weights_before, cause_of)
    cause = causes.of_samples(base, other, number)
    if cause is not None:
        yield Difference("samples", cause)
    yield from _tensors(step, "gradient", lambda one: one.gradients, causes.of_gradients)
    yield from _options(step)
    yield from _tensors(step, "weight", lambda one: one.weights, causes.of_weights)
    yield from _tensors(step, "buffer", lambda one: one.buffers, causes.of_buffers)
    if step.tolerance == 0 and step.mine.weights_sha256 != step.theirs[0].weights_sha256:
        yield Difference("weight", causes.of_bits())


def _tensors(
    step: _Step,
    where: str,
    read: Callable[[StepRecord], Fingerprints],
    cause_of: Callable[[ObservedRun, ObservedRun, int, dict[str, float], dict[str, list[int]]], Cause],
) -> Iterator[Difference | float]:
    """Ranks are compared with rank 0, and rank 0 with the other run."""
    unlike = unlike_rank_0(step.theirs, read, step.tolerance)
    found = distances(read(step.mine), read(step.theirs[0]))
    if where.startswith("weight"):
        negligible = _negligible(step.mine.gradients)
        found = {name: size for name, size in found.items() if name not in negligible}
        unlike = {name: ranks for name, ranks in unlike.items() if name not in negligible}
    differing = {name: size for name, size in found.items() if size > step.tolerance}
    if unlike or differing:
        cause = cause_of(step.base, step.other, step.number, differing, unlike)
        name = next(iter(unlike)) if unlike else farthest(differing)[0]
        yield Difference(where, cause, name, found.get(name, 0.0), tuple(unlike.get(name, ())))
    yield farthest(found)[1]


def _negligible(gradients: Fingerprints) -> set[str]:
    sizes = {name: values[0] for name, values in gradients.items() if values}
    return {name for name, size in sizes.items() if size < _NEGLIGIBLE * max(sizes.values())}


def _options(step: _Step) -> Iterator[Difference]:
    for rank, one in enumerate(step.theirs):
        for reference, ranks in (step.theirs[0], (rank,)), (step.mine, ()):
            for mine, theirs in zip(reference.options, one.options, strict=False):
                name = next((name for name in mine if name in theirs and not _is_close(mine[name], theirs[name])), None)
                if name is not None:
                    where = "learning rate" if name == "lr" else f"option '{name}' of the optimizer"
                    cause = causes.of_options(mine[name], theirs[name], step.other.num_workers, bool(ranks))
                    yield Difference(where, cause, ranks=ranks)


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_close, one, other))
    return bool(abs(one - other) <= 1e-9 * max(abs(one), abs(other)))
