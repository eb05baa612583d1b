"""The first difference between two runs that should have computed the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from paceline.measure.step_record import Fingerprints, StepRecord
from paceline.verify import causes
from paceline.verify.causes import Cause
from paceline.verify.records import Distances, ObservedRun, StepPair, distances_of
from paceline.words import number_of

# Above the rounding of a few steps, far below what a wrong mean or a lost sample does.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
_LOSS_TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 1e-2, "float16": 1e-2}
_ROUNDING = {"float64": 1e-15, "float32": 2.4e-7, "bfloat16": 1.6e-2, "float16": 2e-3}
"""The rounding of a weight in an update, relative to its size."""
_INITIAL_TOLERANCE = 1e-6
_NEGLIGIBLE = 1e-5
"""A gradient this much smaller than all of them together is rounding, which Adam makes as large as any other."""

MEND = "fix what the run reports, and compare again."

Kind = Literal["initial_weights", "samples", "loss", "gradients", "learning_rate", "update", "buffers", "none"]


@dataclass(frozen=True)
class ParityVerdict:
    """Whether a run computed what the one on the smallest number of workers did, or what differs first, and why."""

    workers: int
    outcome: Literal["equal", "differs", "could not tell"]
    steps: int
    first_difference: Kind = "none"
    step: int | None = None
    """From 1."""
    parameter: str = ""
    """The tensor that differs, or the optimizer's option."""
    ranks: tuple[int, ...] = ()
    """The ranks that differ from rank 0."""
    largest_difference: float = 0.0
    """The largest distance of gradients and weights up to the first difference, relative to their size."""
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
            parameter = f" of '{self.parameter}'" if self.parameter else ""
            size = f" by {self.largest_difference:.1e}" if self.largest_difference else ""
            what = self.first_difference.replace("_", " ")
            place = f"FIRST DIFFERENCE: {what}{parameter} in step {self.step}{size}{ranks}"
            lines = [f"DIFFERS  {who}. {place}", f"  why: {self.cause}", f"  do:  {self.advice}"]
        else:
            lines = [f"UNKNOWN  {who}: {self.cause}", f"  do:  {self.advice}"]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def compare(base: ObservedRun, other: ObservedRun) -> ParityVerdict:
    """The verdict on `other`."""
    other = other.named_like(base)
    precision = max((one.precision for one in (base, other)), key=TOLERANCE.__getitem__)
    tolerance = 0.0 if base.is_bitwise else TOLERANCE[precision]
    equal = ParityVerdict(other.num_workers, "equal", len(other.steps), notes=tuple(_notes(base, other)))
    largest = 0.0
    for number in range(equal.steps):
        step = _Comparison(StepPair(base, other, number, tolerance), precision, equal)
        found = step.first_difference()
        if found is not None:
            return found
        largest = max(largest, step.largest)
    if other.failure:
        why = f"{other.failure} The steps before were equal."
        return replace(equal, outcome="could not tell", cause=why, advice=MEND, notes=())
    if len({*base.num_steps, *other.num_steps}) > 1:
        cause = causes.of_numbers_of_steps(base, other)
        number = equal.steps + 1
        return replace(equal, outcome="differs", first_difference="samples", step=number, cause=cause.why,
                       advice=cause.advice)  # fmt: skip
    return replace(equal, largest_difference=largest)


def _notes(base: ObservedRun, other: ObservedRun) -> Iterator[str]:
    if other.failure:
        yield other.failure
    if not any(base.samples(step) for step in range(len(base.steps))):
        yield "samples were not seen, so they were not compared."
    elif other.num_workers > 1 and other.steps and other.shared_samples(0):
        yield "every rank computed all samples; that is right where ranks divide the model, and else a waste."
    off = {layer for run in (base, other) for ranks in run.steps for one in ranks for layer in one.switched_off}
    if off:
        yield f"compared without {' and '.join(sorted(off))}: each worker has its own samples and draws."
    if "dropout" in off and other.num_workers > 1 and len({one.generator_state for one in other.steps[0]}) == 1:
        yield "dropout draws the same masks on all ranks: seed each rank differently after the model is made."


class _Comparison:
    """Compares one step of both runs."""

    def __init__(self, pair: StepPair, precision: str, equal: ParityVerdict) -> None:
        self._pair, self._precision, self._equal = pair, precision, equal
        self.largest = 0.0
        """The largest distance of the tensors that have been compared."""

    def first_difference(self) -> ParityVerdict | None:
        """The first difference in the order in which quantities follow from each other; None if there is none.

        Other samples or losses count only if the gradients differ too: a batch may be padded otherwise, and a loss
        divided later. Where no gradient was seen, the update stands for it.
        """
        pair = self._pair
        exact = min(pair.tolerance, _INITIAL_TOLERANCE)
        changes = self._tensors("update", lambda one: one.changes_before, causes.of_changes_before, is_update=True)
        before = (
            (changes and replace(changes, step=pair.number))
            or self._tensors("initial_weights", lambda one: one.initial_weights, causes.of_initial_weights, exact)
            or self._left_out()
        )
        if before is not None:
            return before
        gradients = self._tensors("gradients", lambda one: one.gradients, causes.of_gradients)
        options = self._options()
        update = self._tensors("update", lambda one: one.update or one.weights, causes.of_update, is_update=True)
        is_seen = any(pair.mine.gradients.values())
        if gradients is not None or (update is not None and options is None and not is_seen):
            samples = causes.of_samples(pair)
            return (samples and self._differs("samples", samples)) or self._loss() or gradients or update
        buffers = self._tensors("buffers", lambda one: one.buffers, causes.of_buffers)
        if pair.tolerance == 0 and pair.mine.weights_sha256 != pair.theirs[0].weights_sha256:
            buffers = buffers or self._differs("update", causes.OF_BITS)
        return options or update or buffers

    def _differs(
        self, kind: Kind, cause: Cause, parameter: str = "", size: float = 0.0, ranks: tuple[int, ...] = ()
    ) -> ParityVerdict:
        size = size if math.isfinite(size) else 0.0  # JSON has no infinity
        return replace(
            self._equal, outcome="differs", first_difference=kind, step=self._pair.number + 1, parameter=parameter,
            ranks=ranks, largest_difference=size, cause=cause.why, advice=cause.advice,
        )  # fmt: skip

    def _left_out(self) -> ParityVerdict | None:
        """The difference of ranks that called `backward` more often than others before this step of the optimizer."""
        counts = [len(one.losses) for one in self._pair.theirs]
        late = tuple(rank for rank, count in enumerate(counts) if count > min(counts))
        return self._differs("update", causes.of_left_out(late), ranks=late) if late else None

    def _loss(self) -> ParityVerdict | None:
        pair = self._pair
        mine, theirs = pair.base.loss(pair.number), pair.other.loss(pair.number)
        if mine is None or theirs is None:
            return None
        size = abs(theirs - mine) / abs(mine) if mine else abs(theirs)
        is_equal = size <= _LOSS_TOLERANCE[self._precision]
        return None if is_equal else self._differs("loss", causes.of_loss(pair, mine, theirs), size=size)

    def _options(self) -> ParityVerdict | None:
        """The difference of the learning rate, or else of another option of the optimizer; between ranks first."""
        pair, found = self._pair, []
        for rank, one in enumerate(pair.theirs):
            for reference, ranks in (pair.theirs[0], (rank,)), (pair.mine, ()):
                for mine, theirs in zip(reference.options, one.options, strict=False):
                    for name in sorted(mine.keys() & theirs.keys()):
                        if not np.allclose(mine[name], theirs[name], rtol=1e-9, atol=0.0):
                            cause = causes.of_option(pair, name, mine[name], theirs[name], is_of_rank=bool(ranks))
                            kind: Kind = "learning_rate" if name == "lr" else "update"
                            found.append(self._differs(kind, cause, name, ranks=ranks))
        return min(found, key=lambda one: (one.first_difference, not one.ranks), default=None)

    def _tensors(
        self,
        kind: Kind,
        read: Callable[[StepRecord], Fingerprints],
        cause_of: Callable[[StepPair, Distances], Cause],
        tolerance: float | None = None,
        *,
        is_update: bool = False,
    ) -> ParityVerdict | None:
        """The first difference of one kind of tensors: of ranks from rank 0, or of rank 0 from the first run. Updates
        whose gradients are rounding are left out, and those left may differ by the rounding of their weights."""
        pair = self._pair
        tolerance = pair.tolerance if tolerance is None else tolerance
        rounding: dict[str, float] = {}
        mine, theirs = read(pair.mine), [read(one) for one in pair.theirs]
        if is_update:
            tolerance = min(10 * tolerance, max(tolerance, 0.3))  # Adam makes more of the rounding of a gradient
            sizes = {name: values[0] for name, values in pair.mine.gradients.items() if values}
            least = _NEGLIGIBLE * max(sizes.values(), default=0.0)
            mine, *theirs = (
                {name: values for name, values in one.items() if sizes.get(name, least) >= least}
                for one in (mine, *theirs)
            )
            if pair.mine.update:
                relative = _ROUNDING[self._precision] / pair.tolerance
                rounding = {name: relative * values[0] for name, values in pair.mine.weights.items()}
        found = distances_of(mine, theirs, tolerance, rounding)
        self.largest = max(self.largest, found.largest)
        if not found:
            return None
        name = next(iter(found.unlike), "") or max(found.differing, key=found.differing.__getitem__)
        size, ranks = found.differing.get(name, 0.0), tuple(found.unlike.get(name, ()))
        return self._differs(kind, cause_of(pair, found), name, size, ranks)
