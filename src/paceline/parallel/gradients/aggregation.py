"""Builds the `Aggregator` of a run from a job and a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm import ALGORITHMS, WIRE_FORMATS, Aggregator, Compressor, Links, Scheduler
from paceline.comm.compressor import RESIDUAL
from paceline.comm.powersgd import PowerSGD
from paceline.comm.randomk import RandomK
from paceline.comm.selection import AlgorithmCandidate, choose, sensible
from paceline.comm.topk import TopK
from paceline.comm.wire import FLOAT32
from paceline.parallel.gradients.buckets import FIRST_BUCKET_BYTES
from paceline.spec import AlgorithmName, Job, Plan
from paceline.spec.algorithm import BUCKET_BYTES
from paceline.spec.wire import WIRE_FACTS

COMPRESSORS: dict[str, Callable[[Job, Links], Compressor]] = {
    "powersgd": lambda job, _links: PowerSGD(job.aggregation.powersgd_rank, job.seed),
    "topk": lambda job, links: TopK(job.aggregation.density, links),
    "randomk": lambda job, _links: RandomK(job.aggregation.density, job.seed),
}

LOSSY = (WIRE_FORMATS["bfloat16"], WIRE_FORMATS["int8"])
"""The wire formats of "auto-lossy"; float16 overflows where bfloat16 of the same size does not."""

_LOSSES: dict[str, str] = {
    **{name: facts.loss for name, facts in WIRE_FACTS.items() if facts.loss},
    "powersgd": "an approximation of rank {spec.powersgd_rank} of each matrix is sent, the rest in later steps",
    "topk": "each worker's largest {spec.density:.2%} of the values are sent, the rest in later steps",
    "randomk": "a random {spec.density:.2%} of the values is sent, the rest in later steps",
}


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
    if wanted in _LOSSES or not chosen.wire.is_exact:
        notes.append(_loss_note(job, wanted if wanted in _LOSSES else chosen.wire.name))
    links = replace(links, wire=chosen.wire)
    scheduler = Scheduler(links.group, links.device, plan.debug_comm)
    compressor = COMPRESSORS[wanted](job, links) if wanted in COMPRESSORS else None
    aggregator = Aggregator(ALGORITHMS[chosen.algorithm], links, scheduler, compressor)
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


class Unsent:
    """The residuals of a run's compressors, which they have not sent yet, as they are saved and loaded.

    A run that goes on where nothing is compressed, as on one worker, adds what earlier workers had not sent to its next
    gradients: nothing that was computed is lost.
    """

    def __init__(self, aggregator: Aggregator | None) -> None:
        self._compressor = None if aggregator is None else aggregator.compressor
        self._residuals: dict[str, Tensor] = {}
        """By `RESIDUAL` and the parameter's name; empty if a compressor keeps them."""

    @property
    def changes(self) -> bool:
        """Whether it changes with every bucket, before the whole gradient of a step is known."""
        return self._compressor is not None or bool(self._residuals)

    def state(self) -> dict[str, Any]:
        """Part of an engine's `own_state`: unsent values count by their sum over the workers."""
        if self._compressor is None:
            return {"sums": dict(self._residuals)} if self._residuals else {}
        state = self._compressor.state_dict()
        residuals = {key: value for key, value in state.items() if key.startswith(RESIDUAL)}
        return {"sums": residuals, "means": {key: value for key, value in state.items() if key not in residuals}}

    def load(self, own: dict[str, Any]) -> None:
        """Go on from a `state`."""
        sums = own.get("sums", {})
        if self._compressor is None:
            self._residuals = {key: value for key, value in sums.items() if key.startswith(RESIDUAL)}
            return
        means = {key: value for key, value in own.get("means", {}).items() if isinstance(value, Tensor)}
        self._compressor.load_state_dict(sums | means)

    def add_to(self, parts: Iterable[tuple[str, Tensor]]) -> None:
        """Add to each named gradient what was loaded for it, in place, until the sum was finite once: other steps are
        skipped. A compressor does so itself."""
        for name, part in parts if self._residuals else ():
            if (residual := self._residuals.get(RESIDUAL + name)) is not None:
                part.add_(residual.to(part))
                if torch.isfinite(part).all():
                    del self._residuals[RESIDUAL + name]


def _bucket_bytes(parameters: Sequence[Tensor]) -> list[int]:
    """The approximate bucket sizes of DistributedDataParallel for these parameters."""
    total = sum(p.nbytes for p in parameters)
    first = min(FIRST_BUCKET_BYTES, total)
    full, last = divmod(total - first, BUCKET_BYTES)
    return [size for size in (first, *[BUCKET_BYTES] * full, last) if size]


def _loss_note(job: Job, wire: str) -> str:
    return (
        f"gradients are not exact: {_LOSSES[wire].format(spec=job.aggregation)}; the result may depend on the number "
        "of workers"
    )
