"""What workers recorded of a run, and the distances of what two runs recorded."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError, reason_of
from paceline.step_records import Fingerprints, StepRecord
from paceline.words import number_of


@dataclass(frozen=True)
class ObservedRun:
    """The steps that all workers recorded."""

    num_workers: int
    precision: str
    is_bitwise: bool
    tp: int
    """Degree of the mesh axis along which workers divide layers, whose sums have another order then."""
    steps: Sequence[Sequence[StepRecord]]
    """steps[step][rank]."""
    num_steps: Sequence[int]
    """How many steps each rank recorded."""

    def samples(self, step: int) -> Counter[int]:
        """The samples of all workers. Where all have the very same ones, they divide the model: they count once."""
        of_ranks = [Counter(one.samples) for one in self.steps[step] if one.samples]
        total: Counter[int] = sum(of_ranks, Counter())
        return total


def load(folder: Path, num_workers: int) -> ObservedRun:
    """What a run of `num_workers` workers left in `folder`.

    Raises:
        PacelineError: there is none, because the program never made an optimizer's step.
    """
    ranks: list[list[StepRecord]] = []
    header: dict[str, object] = {}
    for rank in range(num_workers):
        path = folder / f"rank{rank}.jsonl"
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            header = header or lines[0]
            ranks.append([StepRecord(**line) for line in lines[1:]])
        except FileNotFoundError:
            ranks.append([])
        except (OSError, ValueError, TypeError, IndexError) as problem:
            raise PacelineError(f"The record '{path}' cannot be read: {reason_of(problem)}.") from None
    num_steps = [len(steps) for steps in ranks]
    if not max(num_steps):
        raise PacelineError(
            f"The run on {number_of(num_workers, 'worker')} made no step of an optimizer that could be seen: it should "
            "train a torch.nn.Module by an optimizer of torch."
        )
    return ObservedRun(
        num_workers,
        str(header["precision"]),
        bool(header["is_bitwise"]),
        int(str(header["tp"])),
        list(zip(*ranks, strict=False)),
        num_steps,
    )


def matched(mine: Fingerprints, theirs: Fingerprints) -> dict[str, tuple[Sequence[float], Sequence[float] | None]]:
    """Each tensor of one run with that of the other: by its place where both have as many, else by its name."""
    if len(mine) == len(theirs):
        return {name: (mine[name], other) for name, other in zip(mine, theirs.values(), strict=True)}
    return {name: (values, theirs.get(name)) for name, values in mine.items()}


def distances(mine: Fingerprints, theirs: Fingerprints, scale: float = 1.0) -> dict[str, float]:
    """|scale x a - b| of each tensor, relative to its size; one that hardly matters relative to the whole.

    Infinite where only one run has the tensor.
    """
    whole = math.hypot(*(values[0] for values in mine.values() if values and math.isfinite(values[0])))
    found = {}
    for name, (values, other) in matched(mine, theirs).items():
        if not values or not other:
            found[name] = 0.0 if not values and not other else math.inf
            continue
        size = abs(scale) * max(values[0], 0.01 * whole)
        differences = [scale * a - b for a, b in zip(values[1:], other[1:], strict=True)]
        distance = math.hypot(*differences) / math.sqrt(len(differences))
        if _same(values, other, scale) or distance == 0:
            found[name] = 0.0
        else:
            relative = distance / size if size > 0 else math.inf
            found[name] = math.inf if math.isnan(relative) else relative
    return found


def _same(values: Sequence[float], other: Sequence[float], scale: float) -> bool:
    return all(scale * a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values, other, strict=True))


def farthest(found: Mapping[str, float]) -> tuple[str, float]:
    """The tensor with the largest distance."""
    name = max(found, key=found.__getitem__, default="")
    return name, found.get(name, 0.0)


def unlike_rank_0(
    ranks: Sequence[StepRecord], read: Callable[[StepRecord], Fingerprints], tolerance: float
) -> dict[str, list[int]]:
    """The tensors of which some ranks hold another value than rank 0, with these ranks; of ranks that hold any."""
    found: dict[str, list[int]] = {}
    for rank, one in enumerate(ranks[1:], start=1):
        if read(one) and read(ranks[0]):
            for name, distance in distances(read(ranks[0]), read(one)).items():
                if distance > tolerance:
                    found.setdefault(name, []).append(rank)
    return found
