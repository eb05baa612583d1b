"""Why a run on several workers computed something else: told from the shape of the first difference."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from paceline.step_records import BATCH_NORM, DROPOUT, Fingerprints
from paceline.verify.records import ObservedRun, distances
from paceline.words import number_of

_SCALED = 1e-3
"""Relative distance up to which one gradient is a multiple of another."""
_CLIPPED = 1e-3
"""Relative spread of the gradient's norm over steps that says it was clipped to one length."""


@dataclass(frozen=True)
class Cause:
    why: str
    advice: str
    is_expected: bool = False
    """Whether workers that have samples of their own differ in this with good reason."""


# --- before the first step ---


def of_initial_weights(
    _base: ObservedRun, other: ObservedRun, _step: int, _differing: dict[str, float], unlike: dict[str, list[int]]
) -> Cause:
    if unlike:
        return Cause(
            "ranks begin with different weights, and average the gradients of different models",
            "seed every rank alike before the model is made, or broadcast rank 0's weights, as DDP does.",
        )
    return Cause(
        f"{number_of(other.num_workers, 'worker')} begin with other weights than one: they are drawn after draws that "
        "depend on the number of workers, or scaled by it",
        "seed right before the model is made, and let nothing in it follow from the rank or the number of workers.",
    )


def of_weights_before(
    _base: ObservedRun, _other: ObservedRun, _step: int, _differing: dict[str, float], unlike: dict[str, list[int]]
) -> Cause:
    where = "on some ranks" if unlike else "otherwise on another number of workers"
    return Cause(
        f"something beside the optimizer changes weights {where} between two steps",
        "make every change of weights (an average, a decay, loading the best ones) alike on all ranks.",
    )


# --- samples ---


def share_all_samples(run: ObservedRun, step: int) -> bool:
    """Whether all ranks computed the very same samples."""
    first, *others = (Counter(one.samples) for one in run.steps[step])
    return bool(first) and all(one == first for one in others)


def of_samples(base: ObservedRun, other: ObservedRun, step: int) -> Cause | None:
    """None where the samples of a step are the same, in any order, or were not seen."""
    mine, theirs = base.samples(step), other.samples(step)
    if not mine or not theirs or mine == theirs:
        return None
    num_mine, num_theirs = mine.total(), theirs.total()
    if other.num_workers > 1 and share_all_samples(other, step):
        if Counter(other.steps[step][0].samples) == mine:
            return None  # every rank computed all of them
        return Cause(
            f"all {other.num_workers} ranks were given the same samples",
            "give the loader a DistributedSampler, or Accelerate's prepare: each rank has to read samples of its own.",
        )
    if num_theirs == num_mine * other.num_workers / base.num_workers and other.num_workers > base.num_workers:
        return Cause(
            f"the global batch has {num_theirs} samples instead of {num_mine}: each rank takes as many as one did",
            "divide the batch by the number of workers: write {batch} where the script is told its batch per worker.",
        )
    return _of_other_samples(base, other, step)


def _of_other_samples(base: ObservedRun, other: ObservedRun, step: int) -> Cause:
    mine, theirs = base.samples(step), other.samples(step)
    twice = sum((theirs - mine)[one] for one in theirs if one in mine)
    if twice and not set(theirs) - set(mine):
        return Cause(
            f"{twice} of {theirs.total()} samples are read twice: the sampler repeats samples so that all ranks have "
            "equally many",
            "drop the incomplete batch (drop_last=True), or weigh what each rank has by its number of samples.",
        )
    if theirs.total() != mine.total():
        return Cause(
            f"{theirs.total()} samples instead of {mine.total()}: an incomplete batch is dropped or filled otherwise",
            "use drop_last=True on any number of workers, or weigh what each rank has by its number of samples.",
        )
    steps = range(min(len(base.steps), len(other.steps)))
    all_mine = sum((base.samples(one) for one in steps), Counter[int]())
    all_theirs = sum((other.samples(one) for one in steps), Counter[int]())
    if all_mine & all_theirs:
        return Cause(
            "the samples come in another order: each rank shuffles for itself, or the sampler orders them by the "
            "number of ranks",
            "shuffle by one seed on all ranks (DistributedSampler with the same seed and epoch), or compare with "
            "shuffling off.",
        )
    return Cause(
        "no sample of this step is one that fewer workers had: transforms draw random numbers that follow from the "
        "worker, or the shuffled order does",
        "seed a sample's transforms by its index and the epoch, and the order alike on all ranks; or compare with both "
        "off.",
    )


# --- gradients ---


def of_gradients(
    base: ObservedRun, other: ObservedRun, step: int, differing: dict[str, float], unlike: dict[str, list[int]]
) -> Cause:
    mine, theirs = base.steps[step][0].gradients, other.steps[step][0].gradients
    if unlike:
        return _of_unsummed(other, step, unlike, sum(bool(one) for one in mine.values()))
    missing = [name for name, size in differing.items() if math.isinf(size) and not theirs.get(name)]
    if missing:
        return Cause(
            f"'{missing[0]}' gets no gradient on {other.num_workers} workers, and gets one on {base.num_workers}",
            "train the same parameters on any number of workers; freeze what the loss never uses.",
        )
    scale = _norm(theirs) / _norm(mine) if _norm(mine) else math.nan
    if max(distances(mine, theirs, scale).values(), default=math.inf) < _SCALED:
        return _of_scale(scale, other.num_workers / base.num_workers)
    layers = sorted({*base.steps[step][0].layers, *other.steps[step][0].layers})
    if layers:
        return of_expected(layers)
    return _of_means(base, other, step, len(differing) / len(mine))


def of_expected(layers: list[str]) -> Cause:
    reasons = {
        BATCH_NORM: "batch norm normalises each worker's samples by themselves",
        DROPOUT: "dropout draws other masks on each worker",
    }
    return Cause(
        " and ".join(reasons[layer] for layer in layers),
        "nothing, if this is known; torch.nn.SyncBatchNorm normalises over all workers.",
        is_expected=True,
    )


def _of_unsummed(other: ObservedRun, step: int, unlike: dict[str, list[int]], num_trained: int) -> Cause:
    if len(unlike) < num_trained:
        return Cause(
            f"the gradient of {number_of(len(unlike), 'parameter')} of {num_trained} is not summed over workers: it is "
            "used outside of what DDP wraps, or is frozen, unused or changed by a hook on some ranks",
            "call every trained module inside the wrapped model's forward, alike on all ranks.",
        )
    micro_steps = max(len(one.losses) for one in other.steps[step])
    accumulates = (
        f", and the last of {micro_steps} micro-steps too must not be under no_sync" if micro_steps > 1 else ""
    )
    return Cause(
        "the gradient is not summed over the workers: each updates by its own samples",
        f"wrap the model in DDP and call the wrapped one, or all_reduce gradients before the step{accumulates}.",
    )


def _of_scale(scale: float, ratio: float) -> Cause:
    if math.isclose(scale, ratio, rel_tol=1e-2):
        return Cause(
            f"all gradients are {scale:.3g} times as large: they are summed over the workers, and not averaged",
            "divide by the number of workers once: DDP does it; after an all_reduce of sums the script has to.",
        )
    if math.isclose(scale, 1 / ratio, rel_tol=1e-2):
        return Cause(
            f"all gradients are {scale:.3g} of what they should be: they are divided by the number of workers twice",
            "do not divide the loss by the world size where DDP or FSDP averages gradients.",
        )
    return Cause(
        f"all gradients are {scale:.4g} times as large",
        "look for a factor in the loss that follows from the number of workers or micro-steps, or for clipping.",
    )


def _of_means(base: ObservedRun, other: ObservedRun, step: int, part: float) -> Cause:
    if _is_clipped(base) and not _is_clipped(other):
        return Cause(
            "gradients are clipped before they are summed: each worker clips those of its own samples",
            "clip after the sum over workers, right before the optimizer's step.",
        )
    sizes = [len(one.samples) for one in other.steps[step]]
    if len(set(sizes)) > 1:
        return Cause(
            f"a mean of means: ranks have {', '.join(map(str, sizes))} samples, and the mean of each counts the same",
            "weigh each rank's loss by its number of samples times the number of workers over all samples.",
        )
    if part < 1:
        return Cause(
            "the gradient of some parameters is that of a part of the samples, or of the model, alone",
            "sum the gradients of parameters that several ranks hold, such as norms under sequence parallelism.",
        )
    micro_steps = {len(one.losses) for run in (base, other) for one in run.steps[step]}
    accumulated = " or micro-step" if max(micro_steps) > 1 else ""
    return Cause(
        f"a mean of means: the loss of each worker{accumulated} is a mean over something that workers have "
        "different numbers of, such as tokens, or it compares samples with each other",
        "divide the sum of losses by the tokens of all workers (all_reduce the count), as paceline.Mean does.",
    )


def _is_clipped(run: ObservedRun) -> bool:
    norms = [_norm(ranks[0].gradients) for ranks in run.steps]
    return len(norms) > 1 and max(norms) - min(norms) <= _CLIPPED * max(norms)


def _norm(tensors: Fingerprints) -> float:
    return math.hypot(*(values[0] for values in tensors.values() if values))


# --- the update ---


def of_options(mine: Any, theirs: Any, num_workers: int, is_of_rank: bool) -> Cause:
    is_number = isinstance(mine, float) and isinstance(theirs, float)
    values = f"{theirs:g} instead of {mine:g}" if is_number else f"{theirs} instead of {mine}"
    if is_of_rank:
        return Cause(
            f"ranks have different values ({values}): a schedule, or a choice, that some ranks make alone",
            "let it follow from what all ranks know, such as the number of steps, or broadcast it.",
        )
    grown = [num_workers, num_workers**0.5] if is_number and mine and num_workers > 1 else []
    if any(math.isclose(theirs / mine, one, rel_tol=1e-6) for one in grown):
        return Cause(
            f"it grows with the number of workers ({values})",
            "leave it alone while the global batch stays the same; scale it by the global batch, not by the workers.",
        )
    return Cause(
        f"it depends on the number of workers ({values})",
        "count a schedule's steps in global batches, not in a worker's own.",
    )


def of_weights(
    base: ObservedRun, other: ObservedRun, step: int, differing: dict[str, float], unlike: dict[str, list[int]]
) -> Cause:
    before = other.steps[step - 1][0].weights if step else other.steps[0][0].weights_before
    if not unlike and max(distances(before, other.steps[step][0].weights).values(), default=1) == 0:
        return Cause(
            f"the update was left out on {other.num_workers} workers, by a loss scale or a check for NaN",
            "let all ranks decide alike: all_reduce the flag.",
        )
    if unlike:
        return Cause(
            "the same gradient gave other weights on some ranks: the update is skipped, repeated or changed there, or "
            "the optimizer's state differs",
            "make every change of weights on all ranks; broadcast the optimizer's state after loading it.",
        )
    part = "" if len(differing) == len(base.steps[step][0].weights) else " of some parameters"
    return Cause(
        f"the same gradient and options gave other weights{part}: the optimizer's state, or something beside the "
        "optimizer that changes weights, depends on the number of workers",
        "change weights by the optimizer alone, or alike on any number of workers.",
    )


def of_buffers(
    base: ObservedRun, _other: ObservedRun, step: int, _differing: dict[str, float], unlike: dict[str, list[int]]
) -> Cause:
    if BATCH_NORM in base.steps[step][0].layers:
        return Cause(
            "running statistics of batch norm are those of one rank's samples",
            "nothing, if this is known; torch.nn.SyncBatchNorm computes them over all workers.",
            is_expected=True,
        )
    where = "ranks hold different buffers" if unlike else "a buffer depends on the samples of one worker"
    return Cause(
        f"{where}, and nobody combines them",
        "average buffers over the workers, or compute them from what all workers share.",
    )


def of_bits() -> Cause:
    return Cause("some bits differ", "report it: parity = 'bitwise' promises equal bits.")


def other_numbers_of_steps(base: ObservedRun, other: ObservedRun) -> Cause:
    made = ", ".join(map(str, other.num_steps))
    return Cause(
        f"{number_of(other.num_workers, 'worker')} made {made} steps, and {number_of(base.num_workers, 'worker')} made "
        f"{', '.join(map(str, base.num_steps))}: the script's loop depends on the worker",
        "let the number of steps follow from the global batch and the data set alone.",
    )
