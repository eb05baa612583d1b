"""Do runs on different numbers of workers compute the same? Their traces compared, and the likely cause if not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, reason_of
from paceline.regular_files import parse_json, read_text
from paceline.words import number_of

Fingerprints = Mapping[str, Sequence[float]]
"""Per tensor: its norm, then its inner products with fixed random sign vectors."""

# Above the rounding of a few steps, far below what a wrong mean or a lost sample does.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}


_OTHER_ORDER = (
    "Layers that are divided (tp = {tp}) add in another order, so this was compared up to rounding; the bits are equal "
    "for any dp, fsdp and pp at one tp degree."
)


@dataclass(frozen=True)
class Trace:
    """The steps of one run: the line that every rank wrote for each of them."""

    workers: int
    parity: str
    precision: str
    steps: Sequence[Sequence[Mapping[str, Any]]]
    """steps[step][rank]."""
    tp: int = 1
    """Degree of the mesh axis along which workers divide layers, whose sums have another order then."""

    def batch_digest(self, step: int) -> int:
        return sum(line["batch_digest"] for line in self.steps[step])


@dataclass(frozen=True)
class ParityVerdict:
    """How one number of workers compares with the smallest one. `step` and `tensor` name the first difference."""

    workers: int
    steps: int
    passed: bool
    largest_difference: float = 0.0
    step: int | None = None
    tensor: str = ""
    cause: str = ""
    note: str = ""
    """What a run found out about the loss, such as that it couples samples."""

    def sentence(self) -> str:
        who = number_of(self.workers, "worker")
        if self.passed:
            how = "bit for bit" if self.largest_difference == 0 else f"within {self.largest_difference:.1e}"
            return f"PASS  {who}: the same over {self.steps} steps, {how}" + (f". {self.note}" if self.note else "")
        return f"FAIL  {who}: first differs at step {self.step} in {self.tensor}: {self.cause}"


def load_trace(directory: Path, workers: int) -> Trace:
    """The trace that a run of `workers` workers left in `directory`.

    Raises:
        PacelineError: there is none, because the program took no step through `Run.step`.
    """
    ranks: list[list[dict[str, Any]]] = []
    for rank in range(workers):
        path = directory / f"rank{rank}.jsonl"
        try:
            lines = [parse_json(line) for line in read_text(path).splitlines()]
        except FileNotFoundError:
            lines = []
        except (OSError, ValueError) as problem:
            raise PacelineError(f"The trace '{path}' cannot be read: {reason_of(problem)}.") from None
        if not all(isinstance(line, dict) for line in lines):
            raise PacelineError(f"The trace '{path}' is damaged; run paceline verify again.")
        ranks.append(lines)
    if any(len(lines) < 2 for lines in ranks):
        raise PacelineError(
            f"The run on {number_of(workers, 'worker')} took no training step that could be compared; "
            "the script should call paceline.init, and run.step in its loop."
        )
    header = ranks[0][0]
    return Trace(
        workers,
        header["parity"],
        header["precision"],
        list(zip(*(r[1:] for r in ranks), strict=False)),
        header["tp"],
    )


def compare(base: Trace, again: Trace, others: Sequence[Trace]) -> list[ParityVerdict]:
    """A verdict for `again` (the same number of workers as `base`, run once more) and for each of `others`.

    Bitwise parity promises equal bits at one tp degree: what has another than `base` is compared with the first of its
    own, which is compared with `base` up to rounding.
    """
    first = _judge(base, again)
    if not first.passed:
        data = base.batch_digest(first.step or 0) != again.batch_digest(first.step or 0)
        cause = "unseeded randomness: the same run twice differs; " + (
            "the data set returns other values each time, so draw them from torch, numpy.random or random"
            if data
            else "something in the model or loss draws from a generator of its own, or from the time"
        )
        return [replace(first, cause=cause)]
    verdicts = [first]
    alike = {base.tp: base}
    for other in others:
        of_degree = alike.setdefault(other.tp, other)
        verdicts.append(_judge(base if of_degree is other or base.parity == "numeric" else of_degree, other))
    return verdicts


def _judge(base: Trace, other: Trace) -> ParityVerdict:
    is_exact = base.parity == "bitwise" and base.tp == other.tp
    tolerance = 0.0 if is_exact else TOLERANCE[base.precision]
    num_steps = min(len(base.steps), len(other.steps))
    largest = 0.0

    def fail(step: int, tensor: str, cause: str) -> ParityVerdict:
        return ParityVerdict(other.workers, num_steps, False, step=step, tensor=tensor, cause=cause)

    for step in range(num_steps):
        mine, theirs = base.steps[step][0], other.steps[step][0]
        if base.batch_digest(step) != other.batch_digest(step):
            return fail(step, "the batch", "data order: the global batch holds other samples")
        split = _rank_difference(other.steps[step])
        if split is not None:
            rank, tensor = split
            return fail(step, tensor, f"not synchronised: rank {rank} holds another value than rank 0")
        for kind in ("gradients", "parameters", "buffers"):
            tensor, distance = _farthest(mine[kind], theirs[kind])
            if not distance <= tolerance:
                return fail(step, f"{kind[:-1]} '{tensor}' ({distance:.1e})", _cause(kind))
            largest = max(largest, distance)
        if is_exact and mine["weights_sha256"] != theirs["weights_sha256"]:
            return fail(step, "the weights", "some bits differ")
    if len(other.steps) != len(base.steps):
        cause = f"{len(other.steps)} steps instead of {len(base.steps)}: the script's loop depends on the worker"
        return fail(num_steps - 1, "the number of steps", cause)
    notes: list[str] = []
    if base.parity == "bitwise" and other.tp > 1:
        alike = f"Compared with {base.workers} workers that divide layers alike (tp = {other.tp})."
        notes.append(alike if is_exact else _OTHER_ORDER.format(tp=other.tp))
    return ParityVerdict(other.workers, num_steps, True, largest, note=" ".join(dict.fromkeys(notes)))


def _rank_difference(lines: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """The first rank whose weights are not rank 0's, and the tensor."""
    for rank, line in enumerate(lines):
        if line["weights_sha256"] == lines[0]["weights_sha256"]:
            continue
        for kind in ("parameters", "buffers"):
            for name, fingerprint in line[kind].items():
                if fingerprint != lines[0][kind][name]:
                    return rank, f"{kind[:-1]} '{name}'"
    return None


def _farthest(mine: Fingerprints, theirs: Fingerprints) -> tuple[str, float]:
    """The tensor with the largest relative distance; tensors that hardly matter are measured against the whole."""
    whole = math.hypot(*(values[0] for values in mine.values()))
    worst, worst_distance = "", 0.0
    for name, values in mine.items():
        if name not in theirs:
            return name, math.inf
        if _same(values, theirs[name]):
            continue
        scale = max(values[0], 0.01 * whole)
        relative = _distance(values, theirs[name]) / scale if scale > 0 else math.inf
        if math.isnan(relative):  # only one of them diverged, or each in its own way
            relative = math.inf
        if relative > worst_distance:
            worst, worst_distance = name, relative
    return worst, worst_distance


def _distance(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The root mean square difference of the projections estimates |a - b| without bias in its square."""
    differences = [a - b for a, b in zip(mine[1:], theirs[1:], strict=True)]
    return math.hypot(*differences) / math.sqrt(len(differences))


def _same(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(mine, theirs, strict=True))


def _cause(kind: str) -> str:
    if kind == "buffers":
        return "a buffer that depends on which samples this worker saw, and is not synchronised"
    if kind == "parameters":
        return "the same gradient gave other weights: the optimizer or its learning rate depends on the worker"
    return (
        "mean of means: the loss is not the mean over its samples (but a sum, or a mean over tokens or weights that "
        "differ between samples), or a layer mixes the samples of a batch"
    )
