"""Recommends one of several device counts, with reasons, and finds where more devices stop paying."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.errors import JobError
from paceline.noise import efficiency
from paceline.spec.forecast import ForecastRow
from paceline.words import duration, number_of

_NEARLY = 0.97
"""A smaller count that reaches this fraction of the best throughput is preferred."""
_WORTH_A_DEVICE = 0.5
"""Scaling is inefficient where one more device brings less than this part of what the first one brought."""


def _worth(row: ForecastRow) -> float:
    """Useful samples/s, up to a factor that all rows share."""
    if row.time_to_target_s is not None:
        return 1 / row.time_to_target_s
    if row.useful_efficiency is not None:
        return row.useful_efficiency * row.devices
    return row.samples_per_s


def _efficiency(row: ForecastRow) -> float:
    return row.efficiency if row.useful_efficiency is None else min(row.efficiency, row.useful_efficiency)


def recommend(rows: Sequence[ForecastRow], floor: float) -> ForecastRow:
    """The fastest that keeps its efficiency, or the fewest devices that come near it; the smallest if none does."""
    possible = [row for row in rows if not row.objection]
    if not possible:
        raise JobError(f"None of these device counts can run this job: {rows[0].objection}.")
    efficient = [row for row in possible if _efficiency(row) >= floor - 1e-9] or possible[:1]
    best = max(map(_worth, efficient))
    return next(row for row in efficient if _worth(row) >= _NEARLY * best)


def explain_choice(
    rows: Sequence[ForecastRow], chosen: ForecastRow, floor: float, base_devices: int = 1
) -> tuple[str, str]:
    """The verdict in one line, and the reason in a few sentences.

    Args:
        rows: one for each number of devices.
        base_devices: the devices that speed-ups are said over.
    """
    most = max((row for row in rows if not row.objection), key=lambda row: row.devices)
    sentences = []
    name = _devices(chosen.devices) + (f" ({chosen.placement})" if chosen.placement else "")
    if len(rows) == 1:
        verdict = f"{name}: {chosen.samples_per_s:,.0f} samples/s."
    elif chosen is most and chosen is rows[0]:
        verdict = f"Stay with {name}: this job, as it is, runs on no more."
    elif chosen is rows[0]:
        verdict = f"Stay with {name}: adding devices does not pay here."
    else:
        verdict = f"Use {name}: {_speed(chosen, base_devices)}."
    if chosen.devices > 1:
        sentences.append(
            f"{_devices(chosen.devices)} train at {100 * chosen.efficiency:.0f} % efficiency, "
            f"{duration(chosen.step_s)} a step, bound by {_bound(chosen)}."
        )
    if most.devices > chosen.devices:
        sentences.append(_why_not(most, chosen, floor, base_devices))
    locked = [row for row in rows if row.objection]
    if locked:
        sentences.append(_locked(locked, chosen))
    return verdict, " ".join(sentence for sentence in sentences if sentence)


def _why_not(row: ForecastRow, chosen: ForecastRow, floor: float, base_devices: int) -> str:
    """Why not the most devices."""
    if _efficiency(row) < floor:
        if row.efficiency >= floor and row.useful_efficiency is not None:
            return (
                f"Not {_devices(row.devices)}: a step is {row.speedup:.2f}x as fast, but with a global batch of "
                f"{row.global_batch_size:,} only {100 * row.useful_efficiency:.0f} % of what they cost makes progress, "
                f"below the floor of {100 * floor:g} %."
            )
        return (
            f"Not {_devices(row.devices)}: they train at {_speed(row, base_devices)}, an efficiency of "
            f"{100 * row.efficiency:.0f} % and below the floor of {100 * floor:g} %, bound by {_bound(row)}."
        )
    if _worth(row) <= _worth(chosen) / _NEARLY:
        return f"{_devices(row.devices)} are not faster: they are bound by {_bound(row)}."
    return ""


def _speed(row: ForecastRow, base_devices: int) -> str:
    """ "3.50x the speed of one", or "of 8" where these are the fewest."""
    return f"{row.speedup / base_devices:.2f}x the speed of {base_devices if base_devices > 1 else 'one'}"


def _bound(row: ForecastRow) -> str:
    """ "communication (12.0 of 20.0 ms wait for gradients)"."""
    waits = {
        "communication": f"{duration(row.exposed_s)} of {duration(row.step_s)} wait for gradients",
        "loader": f"loading takes {duration(row.loader_s)}",
        "compute": f"{duration(row.compute_s)} of {duration(row.step_s)}",
        "overhead": f"optimizer, launching and waiting take {duration(row.overhead_s)} of {duration(row.step_s)}",
    }
    return f"{'the ' if row.bound_by == 'loader' else ''}{row.bound_by} ({waits[row.bound_by]})"


def _locked(locked: Sequence[ForecastRow], chosen: ForecastRow) -> str:
    """A sentence about numbers of devices that the job rules out, and the speed they would have."""
    best = max(locked, key=_worth)
    gain = _worth(best) / _worth(chosen)
    promise = f"; {_devices(best.devices)} would be {gain:.2f}x as fast" if gain > 1 / _NEARLY else ""
    which = _devices(best.devices) if len(locked) == 1 else f"{_devices(locked[0].devices)} and more"
    reason = locked[0].objection if not promise else best.objection
    return f"This job does not run on {which}{promise}: {reason}."


def batch_advice(chosen: ForecastRow, noise_scale: float, better: tuple[int, float] | None) -> str:
    """A sentence about a batch larger than the noise scale, with a smaller batch if that is clearly faster; else empty.

    Args:
        better: the best batch on the same devices, and its useful samples/s; None: the batch follows the devices.
    """
    batch = chosen.global_batch_size
    if batch <= noise_scale:
        return ""
    useful = efficiency(batch, noise_scale)
    said = (
        f" The global batch of {batch:,} is {batch / noise_scale:.3g}x the noise scale of {noise_scale:,.0f}: "
        f"{100 * (1 - useful):.0f} % of its samples are wasted."
    )
    if better is not None and better[0] < batch:
        gain = better[1] / (chosen.samples_per_s * useful)
        if gain > 1 / _NEARLY:
            said += f" With global_batch_size = {better[0]} as many devices make progress {gain:.2f}x as fast."
    return said


def scaling_knee(rows: Sequence[ForecastRow]) -> str:
    """The number of devices after which one more brings less than half of what the first one did, and the largest loss
    there, in sentences.

    Args:
        rows: one for each number of devices, in ascending order.
    """
    if len(rows) == 1:
        return "This is the only number of devices here, which tells nothing of scaling."
    for before, row in pairwise(rows):
        later = [other for other in rows if before.devices < other.devices <= 2 * before.devices]
        # Counts that divide the shards unevenly do not count: the best gain up to twice the devices decides.
        gain = max((other.speedup - before.speedup) / (other.devices - before.devices) for other in (row, *later))
        if gain < _WORTH_A_DEVICE:
            return (
                f"Scaling becomes inefficient after {_devices(before.devices)} ({before.speedup:.3g}x): from there a "
                f"further device brings less than half of what the first one brought. {_losses(row)}"
            )
    last = rows[-1]
    return f"Scaling stays efficient up to {_devices(last.devices)} ({last.speedup:.3g}x)."


def _losses(row: ForecastRow) -> str:
    """The largest loss compared with ideal scaling, in a sentence."""
    ideal_s = row.step_s * row.efficiency
    lost = {
        "waiting for gradients": row.exposed_s,
        "passes too small or too uneven to be efficient": row.compute_s - ideal_s,
        "the optimizer and stragglers": row.overhead_s,
        "the loader": row.step_s - row.compute_s - row.exposed_s - row.overhead_s,
    }
    name = max(lost, key=lambda key: lost[key])
    return (
        f"{duration(row.step_s - ideal_s)} of the {duration(row.step_s)} of a step on {_devices(row.devices)} are "
        f"lost, most of it to {name} ({duration(lost[name])})."
    )


def _devices(count: int) -> str:
    return number_of(count, "device")
