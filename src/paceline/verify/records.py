"""What workers recorded of a run, and the distances of what two runs recorded."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.measure.step_record import Fingerprints, StepRecord
from paceline.words import number_of


@dataclass(frozen=True)
class ObservedRun:
    """The steps that all workers recorded."""

    num_workers: int
    precision: str
    is_bitwise: bool
    steps: Sequence[Sequence[StepRecord]]
    """steps[step][rank]."""
    num_steps: Sequence[int]
    """How many steps each rank recorded."""
    failure: str = ""
    """Why the run ended early."""
    libraries: Sequence[str] = ()
    """The libraries that the script has loaded and that read data in an order of their own."""

    def named_like(self, base: ObservedRun) -> ObservedRun:
        """This run with tensors named as in `base`: where names differ, tensors of the same place are the same. Some
        libraries wrap a model on several workers only."""

        def renamed(one: StepRecord, first: StepRecord) -> StepRecord:
            changed: dict[str, Any] = {}
            for field in fields(one):
                theirs, mine = getattr(one, field.name), getattr(first, field.name)
                if isinstance(theirs, dict) and len(mine) == len(theirs) and set(mine) != set(theirs):
                    changed[field.name] = dict(zip(mine, theirs.values(), strict=True))
            return replace(one, **changed)

        pairs = zip(self.steps, base.steps, strict=False)
        return replace(self, steps=[[renamed(one, first) for one in ranks] for ranks, (first, *_) in pairs])

    def samples(self, step: int) -> Counter[int]:
        """The samples of all workers."""
        return sum((Counter(one.samples) for one in self.steps[step]), Counter())

    def shared_samples(self, step: int) -> Counter[int]:
        """The samples of a step, if all ranks computed the very same ones."""
        first, *others = (Counter(one.samples) for one in self.steps[step])
        return first if all(one == first for one in others) else Counter()

    def loss(self, step: int) -> float | None:
        """The sum over micro-steps, mean over workers; None if `backward` was not seen."""
        sums = [math.fsum(one.losses) for one in self.steps[step] if one.losses]
        return math.fsum(sums) / len(sums) if sums else None


@dataclass(frozen=True)
class StepPair:
    """A step of both runs."""

    base: ObservedRun
    other: ObservedRun
    number: int
    """From 0."""
    tolerance: float

    @property
    def mine(self) -> StepRecord:
        return self.base.steps[self.number][0]

    @property
    def theirs(self) -> Sequence[StepRecord]:
        return self.other.steps[self.number]

    @property
    def ratio(self) -> float:
        """Workers of the second run for each worker of the first."""
        return self.other.num_workers / self.base.num_workers

    @property
    def num_micro_steps(self) -> tuple[int, int]:
        """Calls of `backward` in this step on the workers of each run."""
        return max(len(one.losses) for one in self.base.steps[self.number]), max(len(one.losses) for one in self.theirs)

    def divides_the_model(self) -> bool:
        """Whether every worker of the second run computed all samples of the first one."""
        shared = self.other.shared_samples(self.number)
        return self.ratio > 1 and bool(shared) and shared == self.base.samples(self.number)

    def draws(self) -> bool:
        """Whether forward passes drew random numbers."""
        return any(one.draws for one in (self.mine, *self.theirs))

    def shares(self) -> tuple[np.ndarray, bool]:
        """(factors, whether they fit): the factor of each worker's own gradient with which their sum is the gradient of
        the first run, by least squares over the projections of all tensors; 1/N each if all is well."""
        local = [one.local_gradients for one in self.base.steps[self.number]]
        names = [name for name in local[0] if all(name in one.local_gradients for one in self.theirs)]
        if not names or any(set(names) - set(one) for one in local):
            return np.zeros(0), False
        mine = np.mean([_projections(one, names) for one in local], axis=0)
        theirs = [_projections(one.local_gradients, names) for one in self.theirs]
        columns = np.stack(theirs, axis=1)
        found = np.linalg.lstsq(columns, mine, rcond=None)[0]
        left = np.linalg.norm(columns @ found - mine)
        return found, bool(left <= 5 * self.tolerance * np.linalg.norm(mine))


def load(folder: Path, num_workers: int, failure: str = "") -> ObservedRun:
    """The records that `num_workers` workers left in `folder`. Raises `PacelineError` if there is none: the program
    failed, or never made an optimizer's step."""
    ranks: list[list[StepRecord]] = []
    header: dict[str, Any] = {}
    for rank in range(num_workers):
        path = folder / f"rank{rank}.jsonl"
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            header = header or lines[0]
            ranks.append([StepRecord(**line) for line in lines[1:]])
        except FileNotFoundError:
            ranks.append([])
    num_steps = [len(steps) for steps in ranks]
    if not max(num_steps):
        raise PacelineError(
            failure
            or f"The run on {number_of(num_workers, 'worker')} made no step of an optimizer that could be seen: each "
            "process (RANK of WORLD_SIZE) should train a torch.nn.Module by an optimizer of torch."
        )
    steps = list(zip(*ranks, strict=False))
    return ObservedRun(num_workers=num_workers, steps=steps, num_steps=num_steps, failure=failure, **header)


def _projections(tensors: Fingerprints, names: Sequence[str]) -> np.ndarray:
    return np.array([value for name in names for value in tensors[name][1:]])


def distances(
    mine: Fingerprints, theirs: Fingerprints, scale: float = 1.0, rounding: Mapping[str, float] | None = None
) -> dict[str, float]:
    """|scale x a - b| of each tensor, relative to its norm, or to 1 % of the norm of all tensors if that is more.

    Infinite where only one run has the tensor, unless it is all zeros there, or where it is finite in one run only.

    Args:
        rounding: the least size that a distance is relative to, by tensor.
    """
    whole = math.hypot(*(values[0] for values in mine.values() if values and math.isfinite(values[0])))
    found = {}
    for name, values in mine.items():
        other = theirs.get(name, [])
        if not values or not other:
            found[name] = math.inf if any(values) or any(other) else 0.0
            continue
        size = max(abs(scale) * max(values[0], 0.01 * whole), (rounding or {}).get(name, 0.0))
        pairs = [(scale * a, b) for a, b in zip(values[1:], other[1:], strict=True)]
        differing = [a - b for a, b in pairs if a != b and not (math.isnan(a) and math.isnan(b))]
        far = math.hypot(*differing) / math.sqrt(len(pairs)) / size if size else math.inf
        found[name] = (math.inf if math.isnan(far) else far) if differing else 0.0
    return found


def norm_of(tensors: Fingerprints) -> float:
    """The norm of all tensors together."""
    return math.hypot(*(values[0] for values in tensors.values() if values))


@dataclass(frozen=True)
class Distances:
    """How far the tensors of one kind are apart in a step."""

    differing: Mapping[str, float]
    """Distances of the tensors of rank 0 that differ from those of the first run, by name."""
    unlike: Mapping[str, Sequence[int]]
    """Ranks whose value of a tensor differs from rank 0's, by name; ranks that hold no tensors are left out."""
    largest: float
    """The largest distance of a tensor of rank 0 from that of the first run."""

    def __bool__(self) -> bool:
        return bool(self.differing or self.unlike)


def distances_of(
    mine: Fingerprints, theirs: Sequence[Fingerprints], tolerance: float, rounding: Mapping[str, float] | None = None
) -> Distances:
    """How far rank 0's tensors are from `mine`, those of the first run, and other ranks' tensors from rank 0's.

    A tensor whose name is not in `mine` is not compared.
    """
    found = distances(mine, theirs[0], 1.0, rounding)
    unlike: dict[str, list[int]] = {}
    for rank, one in enumerate(theirs[1:], start=1):
        for name, far in (distances(theirs[0], one, 1.0, rounding) if one and theirs[0] else {}).items():
            if far > tolerance:
                unlike.setdefault(name, []).append(rank)
    differing = {name: far for name, far in found.items() if far > tolerance}
    return Distances(differing, unlike, max(found.values(), default=0.0))
