"""Builds the `Aggregator` of a run from a job and a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.comm import ALGORITHMS, WIRE_FORMATS, Aggregator, Links, Scheduler
from paceline.comm.selection import AlgorithmCandidate, choose, sensible
from paceline.comm.wire import FLOAT32
from paceline.parallel.buckets import FIRST_BUCKET_BYTES
from paceline.spec import AlgorithmName, Job, Plan
from paceline.spec.algorithm import BUCKET_BYTES
from paceline.spec.wire import WIRE_FACTS

LOSSY = (WIRE_FORMATS["bfloat16"],)
"""The wire formats of "auto-lossy"; float16 overflows where bfloat16 of the same size does not."""


@dataclass(frozen=True)
class Aggregation:
    """How the workers of a run aggregate gradients."""

    aggregator: Aggregator
    algorithm: AlgorithmName
    """The name of the algorithm: the plan's, or the choice of "auto"."""
    notes: tuple[str, ...]


def set_up_aggregation(job: Job, plan: Plan, links: Links, parameters: Sequence[Tensor]) -> Aggregation:
    """Choose how workers sum these parameters' gradients over their links; a collective of these workers."""
    links = replace(links, num_servers=min(plan.num_servers, links.world_size))
    wanted = job.aggregation.wire
    chosen = AlgorithmCandidate(plan.algorithm, WIRE_FORMATS.get(wanted, FLOAT32))
    notes = []
    if plan.algorithm == "auto" or wanted == "auto-lossy":
        choice = choose(candidates(plan, wanted, links), ALGORITHMS, links, _bucket_bytes(parameters))
        chosen = choice.chosen
        notes += [said] if (said := choice.sentence()) else []
    if not chosen.wire.is_exact:
        lost = WIRE_FACTS[chosen.wire.name].loss
        notes.append(f"gradients are not exact: {lost}; the result may depend on the number of workers")
    links = replace(links, wire=chosen.wire)
    scheduler = Scheduler(links.group, links.device, plan.debug_comm)
    aggregator = Aggregator(ALGORITHMS[chosen.algorithm], links, scheduler)
    return Aggregation(aggregator, chosen.algorithm, tuple(notes))


def candidates(plan: Plan, wanted: str, links: Links) -> list[AlgorithmCandidate]:
    """The candidates: lossy formats only if the user allows them, one algorithm if the user named it."""
    fixed = WIRE_FORMATS.get(wanted, FLOAT32)
    allowed = LOSSY if wanted == "auto-lossy" else () if fixed.is_exact else (fixed,)
    found = sensible(links, allowed)
    if plan.algorithm != "auto":
        found = [AlgorithmCandidate(plan.algorithm, wire) for wire in (FLOAT32, *allowed)]
    return [one for one in found if wanted == "auto-lossy" or one.wire == fixed] or [
        AlgorithmCandidate("all_reduce", fixed)
    ]


def _bucket_bytes(parameters: Sequence[Tensor]) -> list[int]:
    """The approximate bucket sizes of DistributedDataParallel for these parameters."""
    total = sum(p.nbytes for p in parameters)
    first = min(FIRST_BUCKET_BYTES, total)
    full, last = divmod(total - first, BUCKET_BYTES)
    return [size for size in (first, *[BUCKET_BYTES] * full, last) if size]
