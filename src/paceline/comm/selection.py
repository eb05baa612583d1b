"""`algorithm = "auto"`: the candidates that the topology makes sensible, timed on the model's own bucket sizes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.comm.aggregator import Algorithm
from paceline.comm.links import Links
from paceline.comm.timing import fit_cost, largest, time_sum
from paceline.comm.wire import FLOAT32, WireFormat
from paceline.spec import AlgorithmName
from paceline.spec.algorithm import CHOICE_MARGIN, AlphaBeta, automatic_candidates

BUDGET_S = 1.5
"""The time for all measurements of a choice, including the first calls, which set up connections."""

SMALLEST_PROBE_BYTES = 1 << 16


@dataclass(frozen=True)
class AlgorithmCandidate:
    """An algorithm and the format it sends in."""

    algorithm: AlgorithmName
    wire: WireFormat

    def __str__(self) -> str:
        return self.algorithm if self.wire.is_exact else f"{self.algorithm} in {self.wire.name}"


@dataclass(frozen=True)
class AlgorithmChoice:
    """What was chosen, and what a step's aggregation was forecast to take with each candidate, in seconds."""

    chosen: AlgorithmCandidate
    forecast_s: Mapping[AlgorithmCandidate, float]
    """Empty where there was nothing to choose from: nothing was measured then."""

    def sentence(self) -> str:
        """What was chosen, over what, by what margin; empty where nothing was measured."""
        if not self.forecast_s:
            return ""
        ranking = sorted(self.forecast_s.items(), key=lambda item: item[1])
        mine = self.forecast_s[self.chosen]
        others = ", ".join(
            f"{candidate} {_ms(seconds)} ({seconds / mine:.2f}x)"
            for candidate, seconds in ranking
            if candidate != self.chosen
        )
        return f"gradients are summed by {self.chosen}: {_ms(mine)} a step, against {others}"


def sensible(links: Links, lossy: Sequence[WireFormat] = ()) -> list[AlgorithmCandidate]:
    """The candidates for this topology; the backend's own comes first, and alone where nothing can beat it.

    Args:
        lossy: formats that the user allows besides the exact one.
    """
    names = automatic_candidates([len(node) for node in links.nodes], shares_memory=links.shared_memory is not None)
    exact = [AlgorithmCandidate(name, FLOAT32) for name in names]
    # A smaller message does not pay inside a node, where it costs more to write than to send.
    formats = [] if len(links.nodes) == 1 else lossy
    return exact + [AlgorithmCandidate(name, wire) for wire in formats for name in names[:2]]


def choose(
    candidates: Sequence[AlgorithmCandidate],
    algorithms: Mapping[str, Algorithm],
    links: Links,
    bucket_bytes: Sequence[int],
    budget_s: float = BUDGET_S,
) -> AlgorithmChoice:
    """Time the candidates and choose the fastest for buckets of these sizes; a collective with one result for all.

    Sizes grow from 64 KiB to the largest bucket as far as the budget allows; beyond, the line through the timings
    is followed. All decisions are taken on the slowest worker's numbers, which all workers know.
    """
    if len(candidates) == 1:
        return AlgorithmChoice(candidates[0], {})
    each_s = budget_s / len(candidates)
    forecast_s = {}
    for candidate in candidates:
        algorithm = algorithms[candidate.algorithm]
        cost = _measure(algorithm, replace(links, wire=candidate.wire), max(bucket_bytes), each_s)
        forecast_s[candidate] = sum(map(cost.seconds, bucket_bytes))
    fastest = min(candidates, key=forecast_s.__getitem__)
    own = candidates[0]
    is_clear = forecast_s[fastest] < (1 - CHOICE_MARGIN) * forecast_s[own]
    return AlgorithmChoice(fastest if is_clear else own, forecast_s)


def _measure(algorithm: Algorithm, links: Links, largest_bytes: int, budget_s: float) -> AlphaBeta:
    started = time.perf_counter()
    size_bytes = min(SMALLEST_PROBE_BYTES, largest_bytes)
    values = torch.zeros(largest_bytes // 4, dtype=torch.float32, device=links.device)
    time_sum(algorithm, links, values[: size_bytes // 4])  # the first call sets connections up
    sizes, times = [], []
    while True:
        part = values[: size_bytes // 4]
        # The better of two: noise only ever adds.
        times.append(min(time_sum(algorithm, links, part) for _ in range(2)))
        sizes.append(size_bytes)
        spent_s = largest(time.perf_counter() - started, links.group)
        growth = min(4, largest_bytes / size_bytes)
        if growth <= 1 or spent_s + 2 * growth * times[-1] > budget_s:
            return fit_cost(sizes, times)
        size_bytes = int(size_bytes * growth) // 4 * 4


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
