"""Recommends one of several device counts, with reasons, and finds where more devices stop paying."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from paceline.errors import JobError
from paceline.mathematics import NEARLY, fewest_near_fastest
from paceline.spec.forecast import ForecastRow
from paceline.words import duration, number_of

_WORTH_A_DEVICE = 0.5
"""Scaling is inefficient where one more device brings less than this part of what the first one brought."""


def statistical_efficiency(batch_size: float, noise_scale: float, base_batch_size: float = 0.0) -> float:
    """What a sample is worth in a batch of `batch_size`, measured by one in a batch of `base_batch_size`.

    To reach one loss with a global batch of B samples takes S(B) = S_min (1 + B_noise / B) steps, so
    B S(B) = E_min (1 + B / B_noise) samples (McCandlish et al. 2018, arXiv 1812.06162, section 2.3 and appendix A.1):
    (B_noise + B_0) / (B_noise + B), as in Qiao et al., "Pollux", 2021, arXiv 2008.12260, section 3. With B_0 = 0, the
    limit of small batches, it is 1 / (1 + B / B_noise). An infinite noise scale makes every sample worth the same.
    """
    if math.isinf(noise_scale) or batch_size == base_batch_size:
        return 1.0
    return (noise_scale + base_batch_size) / (noise_scale + batch_size)


def _worth(row: ForecastRow) -> float:
    """Useful samples/s, up to a factor that all rows share."""
    if row.time_to_target_s is not None:
        return 1 / row.time_to_target_s
    return row.samples_per_s if row.useful_efficiency is None else row.useful_efficiency * row.devices


def _efficiency(row: ForecastRow) -> float:
    return row.efficiency if row.useful_efficiency is None else row.useful_efficiency


def recommend(rows: Sequence[ForecastRow], floor: float) -> ForecastRow:
    """The fewest devices that come near the fastest that keeps its efficiency; the smallest if none does."""
    possible = [row for row in rows if not row.objection]
    if not possible:
        raise JobError(f"None of these device counts can run this job: {rows[0].objection}.")
    efficient = [row for row in possible if _efficiency(row) >= floor - 1e-9] or possible[:1]
    return efficient[fewest_near_fastest([_worth(row) for row in efficient])]


def explain_choice(
    rows: Sequence[ForecastRow], chosen: ForecastRow, floor: float, base_devices: int = 1
) -> tuple[str, str]:
    """The verdict in one line, and the reason in a few sentences.

    Args:
        rows: one for each number of devices.
        base_devices: the devices that speed-ups are said over.
    """
    most = max((row for row in rows if not row.objection), key=lambda row: row.devices)
    name = _devices(chosen) + (f" ({chosen.placement})" if chosen.placement else "")
    if len(rows) == 1:
        verdict = f"{name}: {chosen.samples_per_s:,.0f} samples/s."
    elif chosen is rows[0]:
        why = "this job, as it is, runs on no more" if chosen is most else "adding devices does not pay here"
        verdict = f"Stay with {name}: {why}."
    else:
        verdict = f"Use {name}: {_speed(chosen, base_devices)}."
    sentences = []
    if chosen.devices > 1:
        sentences.append(
            f"{_devices(chosen)} train at {100 * chosen.efficiency:.0f} % efficiency, "
            f"{duration(chosen.step_s)} a step, bound by {_bound(chosen)}."
        )
    if most.devices > chosen.devices:
        sentences.append(_why_not(most, chosen, floor, base_devices))
    if locked := [row for row in rows if row.objection]:
        best = max(locked, key=_worth)
        gain = _worth(best) / _worth(chosen)
        promise = f"; {_devices(best)} would be {gain:.2f}x as fast" if gain > 1 / NEARLY else ""
        which = _devices(best) if len(locked) == 1 else f"{_devices(locked[0])} and more"
        sentences.append(f"This job does not run on {which}{promise}: {(best if promise else locked[0]).objection}.")
    return verdict, " ".join(filter(None, sentences))


def _why_not(row: ForecastRow, chosen: ForecastRow, floor: float, base_devices: int) -> str:
    """Why not the most devices."""
    if _efficiency(row) >= floor:
        is_slower = _worth(row) <= _worth(chosen) / NEARLY
        return f"{_devices(row)} are not faster: they are bound by {_bound(row)}." if is_slower else ""
    if row.efficiency >= floor and row.useful_efficiency is not None:
        return (
            f"Not {_devices(row)}: a step is {row.speedup:.2f}x as fast, but with a global batch of "
            f"{row.global_batch_size:,} only {100 * row.useful_efficiency:.0f} % of what they cost makes progress, "
            f"below the floor of {100 * floor:g} %."
        )
    return (
        f"Not {_devices(row)}: they train at {_speed(row, base_devices)}, an efficiency of "
        f"{100 * row.efficiency:.0f} % and below the floor of {100 * floor:g} %, bound by {_bound(row)}."
    )


def _devices(row: ForecastRow) -> str:
    return number_of(row.devices, "device")


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


def batch_advice(chosen: ForecastRow, noise_scale: float) -> str:
    """A sentence about a batch larger than the noise scale; else empty."""
    batch = chosen.global_batch_size
    if batch <= noise_scale:
        return ""
    return (
        f" The global batch of {batch:,} is {batch / noise_scale:.3g}x the noise scale of {noise_scale:,.0f}: "
        f"{100 * (1 - statistical_efficiency(batch, noise_scale)):.0f} % of its samples are wasted."
    )


def scaling_knee(rows: Sequence[ForecastRow]) -> str:
    """The number of devices after which one more brings less than half of what the first one did, in sentences.

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
                f"Scaling becomes inefficient after {_devices(before)} ({before.speedup:.3g}x): from there a "
                f"further device brings less than half of what the first one brought, bound by {_bound(row)}."
            )
    return f"Scaling stays efficient up to {_devices(rows[-1])} ({rows[-1].speedup:.3g}x)."
