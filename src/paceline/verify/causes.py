"""Why a run on several workers computed something else: told from the shape of the first difference."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.verify.records import Distances, ObservedRun, StepPair, distances, norm_of
from paceline.words import number_of

_SCALED = 1e-3
"""Relative distance up to which one gradient is a multiple of another, and a number is a round one."""
_ORDERS = {
    "accelerate": " (Accelerate: DataLoaderConfiguration(use_seedable_sampler=True))",
    "lightning": " (Lightning: use_distributed_sampler=False and a DistributedSampler of your own)",
}
"""How the order of samples becomes the same on one process and on several, in libraries that change it."""


@dataclass(frozen=True)
class Cause:
    """The likely cause of a difference, and what to do about it."""

    why: str
    advice: str


def of_initial_weights(pair: StepPair, found: Distances) -> Cause:
    if found.unlike:
        return Cause(
            "ranks begin with different weights: each draws its own, and nobody broadcasts those of rank 0",
            "seed every rank alike before the model is made, or broadcast rank 0's weights, as DDP does.",
        )
    return Cause(
        f"{number_of(pair.other.num_workers, 'worker')} begin with other weights than one: they are drawn after draws "
        "or a division that follow from the number of workers, or scaled by it",
        "seed right before the model is made, draw it as a whole, and let nothing in it follow from the rank.",
    )


def of_changes_before(_pair: StepPair, found: Distances) -> Cause:
    where = "on some ranks" if found.unlike else "otherwise on another number of workers"
    return Cause(
        f"something beside the optimizer changes weights {where} after this step",
        "make every change of weights (an average such as EMA, a decay, loading the best ones) alike on all ranks.",
    )


def of_left_out(ranks: tuple[int, ...]) -> Cause:
    return Cause(
        f"rank {', '.join(map(str, ranks))} skips the optimizer's step after a backward(), and others make it",
        "let all ranks decide alike whether to make a step: all_reduce what they decide by (a loss, a check for NaN).",
    )


def of_samples(pair: StepPair) -> Cause | None:
    """Why the samples of a step differ; None if they are the same in any order, or were not seen."""
    base, other, step = pair.base, pair.other, pair.number
    mine, theirs = base.samples(step), other.samples(step)
    times = theirs.total() // mine.total() if mine else 0
    columns = [Counter(one for rank in run.steps[step] for one in rank.columns) for run in (base, other)]
    if theirs == mine or (columns[0] and columns[0] == columns[1]):
        return None
    if times > 1 and other.num_workers % times == 0 and theirs == Counter({one: times * mine[one] for one in mine}):
        return None  # so many ranks each divide the model, or compute the same
    if pair.ratio > 1 and other.shared_samples(step):
        return Cause(
            f"all {other.num_workers} ranks were given the same samples",
            "give the loader a DistributedSampler, or Accelerate's prepare: each rank has to read samples of its own.",
        )
    if theirs.total() == mine.total():
        return _of_other_samples(pair)
    return _of_other_number(pair, mine, theirs)


def _of_other_number(pair: StepPair, mine: Counter[int], theirs: Counter[int]) -> Cause:
    said = f"the global batch has {theirs.total()} samples instead of {mine.total()}"
    of_base, of_other = pair.num_micro_steps
    if of_other != of_base and theirs.total() * of_base == mine.total() * of_other:
        return Cause(
            f"{said}: {number_of(of_other, 'micro-step')} between two updates where one worker makes {of_base}",
            "count micro-steps and updates alike on any number of workers.",
        )
    if theirs.total() == mine.total() * pair.ratio:
        return Cause(
            f"{said}: each rank takes as many as one did, the batch is not divided by the number of workers",
            "divide the batch by the number of workers: write {batch} where the script is told its batch per worker.",
        )
    if theirs.total() * pair.ratio == mine.total():
        return Cause(
            f"{said}: a batch per worker is divided by the number of workers once more",
            "give what divides a batch itself, such as Accelerate's split_batches, the global batch.",
        )
    even = "use drop_last=True on any number of workers, or weigh what each rank has by its number of samples."
    if not mine - theirs:
        added = f"{theirs.total() - mine.total()} of {theirs.total()} samples"
        return Cause(f"{added} are read once more: the sampler repeats samples to fill the last batches", even)
    return Cause(f"{said}: an incomplete batch is dropped or filled otherwise", even)


def _of_other_samples(pair: StepPair) -> Cause:
    base, other = pair.base, pair.other
    steps = range(min(len(base.steps), len(other.steps)))
    all_mine = sum((base.samples(one) for one in steps), Counter[int]())
    all_theirs = sum((other.samples(one) for one in steps), Counter[int]())
    hint = next((_ORDERS[name] for name in reversed(other.libraries) if name in _ORDERS), "")
    several = sum(count > all_mine[one] and count > 1 for one, count in all_theirs.items())
    advice = f"shuffle by the same seed and epoch (set_epoch) on all ranks, on one worker too{hint}; or not at all."
    if not all_mine & all_theirs:
        return Cause(
            "no sample of this step is one that fewer workers had: random transforms, or the order, follow from the "
            "worker",
            f"seed a sample's transforms by its index and the epoch; {advice}",
        )
    if several:
        return Cause(
            f"each rank shuffles for itself, in an order of its own: {number_of(several, 'sample')} of "
            f"{len(all_theirs)} came more often than once, others not at all",
            advice,
        )
    why = "the samples come in another order: it follows from the number of workers, or each rank shuffles for itself"
    return Cause(why, advice)


def of_numbers_of_steps(base: ObservedRun, other: ObservedRun) -> Cause:
    made = [", ".join(map(str, run.num_steps)) for run in (other, base)]
    return Cause(
        f"{number_of(other.num_workers, 'worker')} made {made[0]} steps, and {number_of(base.num_workers, 'worker')} "
        f"made {made[1]}: the script's loop depends on the worker",
        "let the number of steps follow from the global batch and the data set alone.",
    )


def of_loss(pair: StepPair, mine: float, theirs: float) -> Cause:
    """Why losses of the same samples and weights differ."""
    scale, ratio = theirs / mine if mine else math.inf, pair.ratio
    of_base, of_other = pair.num_micro_steps
    if pair.draws():
        return _OF_DRAWS
    if pair.divides_the_model():
        return Cause(
            "from the same samples and weights the ranks compute another loss than one worker: a layer is divided "
            "along a wrong dimension, or parts of its output are not summed over the ranks (tensor parallelism)",
            "check the plan of each divided layer, and that heads per rank are the heads divided by the ranks.",
        )
    if of_base != of_other and _is_near(scale, of_other / of_base):
        return Cause(
            f"the loss is {scale:.3g} times as large: micro-steps ({of_base} on one worker, {of_other} here) are added "
            "up and not divided by their number",
            "divide each micro-step's loss by the number of micro-steps of an update.",
        )
    if _is_near(scale, 1 / ratio):
        return Cause(
            f"the loss is {scale:.3g} of what it should be: it is divided by the number of workers, though gradients "
            "are averaged, too; or it is a sum over a worker's samples and no mean",
            "do not divide the loss by the world size, and let it be a mean over samples.",
        )
    if _is_near(scale, ratio):
        return Cause(
            f"the loss is {scale:.3g} times as large: it is multiplied by the number of workers, or summed over them",
            "leave the loss a mean over a worker's own samples: gradients are averaged afterwards.",
        )
    shares, is_sum = pair.shares()
    if is_sum:
        return _of_shares(pair, shares, f"the loss is {scale:.4g} times as large")
    if pair.theirs[0].local_gradients and max(of_base, of_other) == 1:
        return Cause(
            "the loss is not one of each worker's own samples alone, or another one on some ranks: it compares samples "
            "with each other (contrastive terms, statistics of a batch), or holds what follows from the rank",
            "gather what samples are compared with from all workers, and use the same loss on all ranks.",
        )
    return _of_losses_alone(pair, mine)


_OF_DRAWS = Cause(
    "the forward pass draws random numbers, of each worker its own",
    "switch such noise off to compare; it is no mistake as long as each rank draws other numbers.",
)


def _of_shares(pair: StepPair, shares: np.ndarray, scaled: str) -> Cause:
    """Why losses or gradients differ where the first run's gradient is the sum of the workers' own times `shares`."""
    if np.ptp(shares) < _SCALED * abs(shares).max():
        return Cause(
            f"{scaled}, on each worker alike",
            "look for a factor of the loss that follows from the number of workers or of micro-steps.",
        )
    factors = [1 / len(shares) / float(share) if share else math.inf for share in shares]
    odd = [rank for rank, factor in enumerate(factors) if not _is_near(factor, 1)]
    are_round = all(_is_round(factors[rank]) for rank in odd) and not _is_near(shares.sum(), 1)
    return _of_ranks(odd, factors) if len(odd) < len(shares) or are_round else _of_means(pair, shares)


def _of_losses_alone(pair: StepPair, mine: float) -> Cause:
    """Why losses differ, told by the losses of the ranks: the gradients of their own samples were not seen."""
    losses = [math.fsum(one.losses) for one in pair.theirs]
    rests = [len(losses) * mine - math.fsum(losses) + loss for loss in losses]
    factors = [loss / rest if rest else math.inf for loss, rest in zip(losses, rests, strict=True)]
    odd = [rank for rank, factor in enumerate(factors) if _is_round(factor)]
    return _of_ranks(odd, factors) if odd else _of_means(pair)


def _of_ranks(odd: list[int], factors: list[float]) -> Cause:
    said = ", ".join(f"on rank {rank} it is {factors[rank]:.3g} times as large" for rank in odd)
    return Cause(
        f"the loss is scaled otherwise on some ranks: {said} as on one worker",
        "use the same loss, loss scale and weights of its terms on all ranks.",
    )


def _of_means(pair: StepPair, shares: np.ndarray | None = None) -> Cause:
    sizes = [len(one.samples) for one in pair.theirs]
    what = f"samples ({', '.join(map(str, sizes))})" if len(set(sizes)) > 1 else "tokens, masked places or weights"
    counts = ", ".join(f"{share:.1%}" for share in shares) if shares is not None else ""
    told = f": they should count {counts}, and count the same" if counts else ""
    accumulated = " or micro-step" if max(pair.num_micro_steps) > 1 else ""
    return Cause(
        f"a mean of means: the loss of each worker{accumulated} is a mean over something that workers have different "
        f"numbers of, such as {what}{told}",
        "divide the sum of losses by the number over all workers (all_reduce the count), as paceline.Mean does.",
    )


def _is_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SCALED)


def _is_round(factor: float) -> bool:
    """Whether it is 0, or it or one over it is a whole number above 1: a factor that a person would write."""
    largest = max(abs(factor), 1 / abs(factor)) if factor and math.isfinite(factor) else 0.0
    return factor == 0 or (largest > 1.5 and _is_near(largest, round(largest)))


def of_gradients(pair: StepPair, found: Distances) -> Cause:
    num_trained = sum(bool(one) for one in pair.mine.gradients.values())
    if found.unlike:
        return _of_unsummed(pair, found, num_trained)
    scale = _multiple_of(pair, [*pair.mine.gradients])
    if scale is not None:
        return _of_scale(pair, scale, "all gradients are")
    if pair.draws():
        return _OF_DRAWS
    if _is_clipped(pair):
        return Cause(
            "gradients are clipped before they are summed, or by the norm of a shard: each worker has its own norm",
            "clip after the sum over workers, right before the optimizer's step, by the norm of the whole gradient.",
        )
    if len(found.differing) < num_trained:
        scale = _multiple_of(pair, [*found.differing])
        who = f"the gradient of {number_of(len(found.differing), 'parameter')} of {num_trained} is"
        if scale is not None:
            return _of_scale(pair, scale, who)
        return Cause(
            f"{who} missing, or that of a part of the samples, or of the model, alone",
            "sum the gradients of parameters that several ranks hold, such as norms under sequence parallelism.",
        )
    shares, is_sum = pair.shares()
    if is_sum and np.ptp(shares) < _SCALED:
        return Cause(
            "each worker's own gradient is right, and what the optimizer finds is not their mean: it is changed before "
            "the sum, summed before the last micro-step or in part, or an earlier one was left in it (zero_grad)",
            "sum the gradients once, after the last backward of an update and before anything changes them.",
        )
    return _of_shares(pair, shares, "gradients are larger or smaller") if is_sum else _of_means(pair)


def _of_unsummed(pair: StepPair, found: Distances, num_trained: int) -> Cause:
    unlike, theirs, micro_steps = found.unlike, pair.theirs, pair.num_micro_steps[1]
    without = sorted({rank for name in unlike for rank, one in enumerate(theirs) if not any(one.gradients[name])})
    number = f"the gradient of {number_of(len(unlike), 'parameter')} of {num_trained}"
    if without and len(unlike) < num_trained:
        return Cause(
            f"{number} is missing on rank {', '.join(map(str, without))}: it is frozen, unused or dropped there",
            "train the same parameters on all ranks, and let each take part in every rank's loss.",
        )
    if pair.divides_the_model():
        return Cause(
            f"{number} is not summed over the ranks that divide the model (tensor or sequence parallelism): each has "
            "the gradient of its own part of the computation",
            "all_reduce these gradients over the ranks that divide the model, or let a parallel plan hold them.",
        )
    if len(unlike) < num_trained:
        return Cause(
            f"{number} is not summed over workers: it is used outside of what DDP or FSDP wraps, is ignored there, or "
            "changed by a hook on some ranks",
            "call every trained module inside the wrapped model's forward, alike on all ranks.",
        )
    return Cause(
        "the gradient is not summed over the workers when the optimizer makes its step: each updates by its own "
        "samples" + (f" of one of {micro_steps} micro-steps at least" if micro_steps > 1 else ""),
        "wrap the model in DDP and call the wrapped one, or all_reduce gradients before the step"
        + (", after the last micro-step, which must not be under no_sync." if micro_steps > 1 else "."),
    )


def _of_scale(pair: StepPair, scale: float, who: str) -> Cause:
    if pair.divides_the_model() and (_is_near(scale, pair.ratio) or _is_near(scale, 1 / pair.ratio)):
        return Cause(
            f"{who} {scale:.3g} of what it should be: it is counted on each of the ranks that divide the model, or on "
            "one of them alone (tensor or sequence parallelism)",
            "check where divided and whole parts of the model meet: a whole tensor taken for a slice, a sum left out.",
        )
    if math.isclose(scale, pair.ratio, rel_tol=1e-2):
        return Cause(
            f"{who} {scale:.3g} times as large: summed over the workers, and not averaged",
            "divide by the number of workers once: DDP does it; after an all_reduce of sums the script has to.",
        )
    if math.isclose(scale, 1 / pair.ratio, rel_tol=1e-2):
        return Cause(
            f"{who} {scale:.3g} of what it should be: divided by the number of workers twice",
            "do not divide gradients by the world size where DDP or FSDP averages them.",
        )
    return Cause(
        f"{who} {scale:.4g} times as large",
        "look for a factor that follows from the number of workers or micro-steps, or for a norm of each worker's own.",
    )


def _multiple_of(pair: StepPair, names: list[str]) -> float | None:
    """The factor by which all these gradients are larger than in the first run; None if there is no such factor."""
    both = pair.mine.gradients, pair.theirs[0].gradients
    mine, theirs = ({name: one[name] for name in names if one.get(name)} for one in both)
    scale = norm_of(theirs) / norm_of(mine) if norm_of(mine) else 0.0
    far = max(distances(mine, theirs, scale).values(), default=math.inf) if scale else math.inf
    return scale if far < max(_SCALED, pair.tolerance) else None


def _is_clipped(pair: StepPair) -> bool:
    """Whether the first run's gradients become shorter between backward and the step, to one length or by a factor."""
    local, gradients = pair.mine.local_gradients, pair.mine.gradients
    names = [name for name in local if gradients.get(name)]
    if names and pair.base.num_workers == 1:
        own, found = (np.array([value for name in names for value in one[name][1:]]) for one in (local, gradients))
        factor = float(own @ found / (own @ own))
        return factor < 1 - _SCALED and not math.log2(max(factor, 1e-300)).is_integer()  # a loss scale is a power of 2
    norms = [norm_of(ranks[0].gradients) for ranks in pair.base.steps]
    return len(norms) > 1 and max(norms) - min(norms) <= _SCALED * max(norms)


def of_option(pair: StepPair, name: str, mine: Any, theirs: Any, *, is_of_rank: bool) -> Cause:
    """Why the learning rate, or another option of the optimizer, differs."""
    is_number = isinstance(mine, float) and isinstance(theirs, float)
    values = f"{theirs:g} instead of {mine:g}" if is_number else f"{theirs} instead of {mine}"
    if is_of_rank:
        return Cause(
            f"ranks have different values of {name} ({values}): a schedule, or a choice, that some ranks make alone",
            "let it follow from what all ranks know, such as the number of steps, or broadcast it.",
        )
    ahead = round(pair.number * pair.ratio)
    later = [group.get(name) for ranks in pair.base.steps[ahead : ahead + 1] for group in ranks[0].options]
    if pair.number and is_number and any(isinstance(value, float) and _is_near(theirs, value) for value in later):
        return Cause(
            f"the schedule is stepped {pair.ratio:g} times an update, once for each worker or micro-step ({values}, "
            f"which one worker has {ahead} steps after its first)",
            "step the schedule once for each update of the whole batch (Accelerate: leave it out of prepare).",
        )
    grown = [pair.ratio, pair.ratio**0.5] if is_number and mine and pair.ratio > 1 else []
    if any(math.isclose(theirs / mine, one, rel_tol=1e-6) for one in grown):
        return Cause(
            f"{name} grows with the number of workers ({values})",
            "leave it alone while the global batch stays the same; scale it by the global batch, not by the workers.",
        )
    return Cause(
        f"{name} depends on the number of workers ({values})",
        "count a schedule's steps in global batches, not in a worker's own.",
    )


def of_update(pair: StepPair, found: Distances) -> Cause:
    still = [str(rank) for rank, one in enumerate(pair.theirs) if one.update and norm_of(one.update) == 0]
    if found.unlike:
        told = f", and rank {', '.join(still)} made none" if still else ""
        return Cause(
            f"the same gradient gave other weights on some ranks{told}: the update is skipped, repeated or changed "
            "there, or the optimizer's state differs",
            "make every change of weights on all ranks; broadcast the optimizer's state after loading it.",
        )
    what = "no update" if still else "another update"
    return Cause(
        f"the same gradient and options gave {what}: a loss scale or a check for NaN, the optimizer's state, or what "
        "changes weights beside it, depends on the number of workers",
        "let all ranks decide alike (all_reduce the flag), and change weights by the optimizer alone.",
    )


def of_buffers(_pair: StepPair, found: Distances) -> Cause:
    where = "ranks hold different buffers" if found.unlike else "buffers depend on the number of workers"
    return Cause(
        f"{where} (or weights that are an average, such as EMA): they follow from one worker's samples or choices",
        "average buffers over the workers, or compute them from what all workers share.",
    )


OF_BITS = Cause("some bits differ", "report it: parity = 'bitwise' promises equal bits.")
