"""The program that times sums over all workers, one process a worker: `python -m paceline.measure.collective_bench`.

It reads a `CommRequest`, where {} asks for all its defaults; the first worker leaves a `CommTimings`. As in nccl-tests,
every vector holds known numbers and every sum is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from statistics import median_high

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from paceline.comm import ALGORITHMS, WIRE_FORMATS, Algorithm, Links, open_links
from paceline.errors import JobError, LaunchError, PacelineError
from paceline.measure.load import LoadMeter
from paceline.measure.program import Report, run_program, unreported
from paceline.measure.stopwatch import Stopwatch
from paceline.measure.timing import fit_cost, largest, time_sum
from paceline.measure.workers import free_bytes, join_workers
from paceline.spec.algorithm import ALGORITHM_FACTS
from paceline.spec.comm_timing import (
    TIMINGS_FILE,
    CommCase,
    CommFit,
    CommRequest,
    CommTiming,
    CommTimings,
    UntimedCases,
    message_sizes,
)
from paceline.spec.wire import WIRE_FACTS
from paceline.train.process.process_group import World
from paceline.train.records.environment import describe_environment

PERIOD = 65_537
"""Values after which a vector repeats; a prime, so that no two slices that algorithms cut are alike."""


def time_cases(
    request: CommRequest,
    links: Links,
    algorithms: Mapping[str, Algorithm] = ALGORITHMS,
    report: Report = unreported,
) -> tuple[list[CommTiming], list[UntimedCases]]:
    """Time every case at every size as far as the budget goes; a collective, with one result for all workers.

    Sizes grow, and within a round all cases take turns, because machines are noisy. What a call will take at the next
    size is forecast from the last one by its bytes; the slowest cases are left out first when not all fit. The
    smallest size is timed in any case.

    Args:
        report: told before every call what it is and which share of all calls is done.

    Raises:
        PacelineError: a wrong sum; names algorithm and size.
    """
    asked = set(request.sizes_bytes)
    sizes = _with_steps(sorted(asked))
    timings: list[CommTiming] = []
    left_out = _pointless(request, links)
    bench = _Bench(request, links, algorithms)
    call_s: dict[CommCase, float] = {}
    for case in dict.fromkeys(request.cases):
        if all(case != other.case for other in left_out):
            bench.call(case, sizes[0])  # sets connections up
            call_s[case] = bench.call(case, sizes[0]).whole_s

    last_size = sizes[0]
    for place, size in enumerate(sizes):
        left_s = bench.left_s()
        forecast_s = {case: seconds * size / last_size for case, seconds in call_s.items()}
        missing = tuple(later for later in sizes[place:] if later in asked)
        if not bench.fits_into_memory(size):
            reason = "the vectors and their copies need more memory than is free"
            left_out += [UntimedCases(case, missing, reason) for case in forecast_s]
            break
        while place > 0 and forecast_s and sum(forecast_s.values()) > left_s:
            case = max(forecast_s, key=forecast_s.__getitem__)
            reason = f"about {forecast_s.pop(case):.2g} s a call; the budget is {request.budget_s:g} s for all"
            left_out.append(UntimedCases(case, missing, reason))
        if not forecast_s:
            break
        growths = [later / size for later in sizes[place + 1 : place + 3]]
        num_rounds = 1
        if size in asked:
            num_rounds = _num_rounds(request.num_rounds, left_s, sum(forecast_s.values()), growths, len(missing) - 1)

        def report_turn(doing: str, done: float, place: int = place) -> None:
            report(doing, (place + done) / len(sizes))

        samples = _take_turns(bench, list(forecast_s), size, num_rounds, growths, report_turn)
        timings += [_timing(case, size, calls) for case, calls in samples.items() if size in asked]
        call_s = {case: min(call.whole_s for call in calls) for case, calls in samples.items()}
        last_size = size
    return timings, left_out


def _take_turns(
    bench: _Bench,
    cases: Sequence[CommCase],
    size_bytes: int,
    num_rounds: int,
    growths: Sequence[float],
    report: Report,
) -> dict[CommCase, list[_Sample]]:
    """Samples of every case, one a round; stops early if another round would leave no time for the next size."""
    samples: dict[CommCase, list[_Sample]] = {case: [] for case in cases}
    for number in range(num_rounds):
        for turn, case in enumerate(cases):
            done = (number + turn / len(cases)) / num_rounds
            report(f"{size_bytes:,} bytes, round {number + 1} of {num_rounds}: {case}", done)
            samples[case].append(bench.call(case, size_bytes))
        round_s = sum(calls[-1].whole_s for calls in samples.values())
        if bench.left_s() < round_s * (1 + sum(growths[:1])):
            break
    return samples


def _with_steps(sizes: Sequence[int]) -> list[int]:
    """`sizes`, and some between those that lie far apart: a forecast goes one step, no further."""
    steps = [sizes[0]]
    for size in sizes[1:]:
        steps += message_sizes(steps[-1], size)[1:]
    return steps


def _pointless(request: CommRequest, links: Links) -> list[UntimedCases]:
    """Cases whose algorithm sends nothing in their wire format: their figures would be those of float32."""
    left_out = []
    for case in dict.fromkeys(request.cases):
        if case.wire == "float32":
            continue
        if ALGORITHM_FACTS[case.algorithm].ignores_wire:
            left_out.append(UntimedCases(case, request.sizes_bytes, "whatever the format, it sends values as they are"))
        elif ALGORITHM_FACTS[case.algorithm].has_levels and len(links.nodes) == 1:
            reason = "inside a node it leaves values as they are, and there is one node"
            left_out.append(UntimedCases(case, request.sizes_bytes, reason))
    return left_out


def _num_rounds(most: int, left_s: float, round_s: float, growths: Sequence[float], num_to_come: int) -> int:
    """Rounds of a size: half of the time left if one size is to come, a quarter if two are, all of it if none is.

    Less where a round of the next two steps would not fit any more. To look further ahead would mean to believe that a
    call which is all latency will take a thousand times as long for a thousand times the bytes.

    Args:
        round_s: what a round of this size takes.
        growths: bytes of the next two steps over those of this one.
        num_to_come: larger sizes that are asked for.
    """
    share_s = left_s / 2**num_to_come
    spare_s = left_s - round_s * sum(growths)
    return max(1, min(most, int(min(share_s, spare_s) / round_s)))


def _timing(case: CommCase, size_bytes: int, calls: Sequence[_Sample]) -> CommTiming:
    counts = [call.link_bytes for call in calls if call.link_bytes is not None]
    return CommTiming(case, size_bytes, tuple(call.sum_s for call in calls), median_high(counts) if counts else None)


def fit(timings: Sequence[CommTiming]) -> list[CommFit]:
    """The cost alpha + beta n of every case, fitted through the medians of its sizes."""
    fits = []
    for case in dict.fromkeys(timing.case for timing in timings):
        mine = [timing for timing in timings if timing.case == case]
        cost = fit_cost([timing.size_bytes for timing in mine], [timing.median_s for timing in mine])
        fits.append(CommFit(case, cost.alpha_s, cost.beta_s_per_byte))
    return fits


@dataclass(frozen=True)
class _Sample:
    sum_s: float
    whole_s: float
    """Seconds of a sum, including the time to write and check the numbers."""
    link_bytes: float | None


class _Bench:
    """A vector of known numbers, and the calls that sum it."""

    def __init__(self, request: CommRequest, links: Links, algorithms: Mapping[str, Algorithm]) -> None:
        self._links = links
        self._budget_s = request.budget_s
        self._stopwatch = Stopwatch()
        self._algorithms = algorithms
        self._dtype = getattr(torch, request.dtype)
        self._num_servers = min(request.num_servers, links.world_size)
        self._counters = None if request.interface is None else _counters(request.interface)
        self._vector = torch.empty(0, dtype=self._dtype, device=links.device)
        # Small whole numbers: their sums are exact in every format for up to 128 workers.
        numbers = [
            torch.randint(-2, 3, (PERIOD,), generator=torch.Generator().manual_seed(rank))
            for rank in range(links.world_size)
        ]
        self._mine = numbers[links.rank].to(links.device, self._dtype)
        self._sum = sum(numbers[1:], numbers[0]).to(links.device, self._dtype)

    def call(self, case: CommCase, size_bytes: int) -> _Sample:
        """Write the numbers, sum them, check the sum. Raises `PacelineError` on all workers if it is wrong on any."""
        clock = Stopwatch()
        if self._vector.nbytes < size_bytes:  # kept, because new memory costs as much time as a fast sum
            self._vector = torch.empty(size_bytes // self._dtype.itemsize, dtype=self._dtype, device=self._links.device)
        values = self._vector[: size_bytes // self._dtype.itemsize]
        for slice_, numbers in _periods(values, self._mine):
            slice_.copy_(numbers)
        before = self._link_bytes()
        sum_s = time_sum(_in_float(self._algorithms[case.algorithm]), self._links_for(case), values)
        after = self._link_bytes()
        self._check(case, values)
        whole_s = largest(clock.spent_s, self._links.group)
        crossed = None
        if before is not None and after is not None:
            crossed = largest(max(now - then for now, then in zip(after, before, strict=True)), self._links.group)
        return _Sample(sum_s, whole_s, crossed)

    def left_s(self) -> float:
        """What is left of the budget, by the slowest worker's clock."""
        return self._budget_s - largest(self._stopwatch.spent_s, self._links.group)

    def fits_into_memory(self, size_bytes: int) -> bool:
        """Whether every node has room: three vectors a worker, and one of each worker where all send to one."""
        num_local = 1 if self._links.device.type == "cuda" else len(self._links.node)
        missing = size_bytes * (3 * num_local + self._links.world_size) - free_bytes(self._links.device)
        return largest(missing, self._links.group) <= 0

    def _links_for(self, case: CommCase) -> Links:
        links = replace(self._links, wire=WIRE_FORMATS[case.wire], num_servers=self._num_servers)
        if case.order == "by_node":
            return links
        return replace(links, nodes=in_turn(links.nodes), node_group=None)

    def _link_bytes(self) -> tuple[int, ...] | None:
        return None if self._counters is None else tuple(int(path.read_text()) for path in self._counters)

    def _check(self, case: CommCase, values: Tensor) -> None:
        """Raise `PacelineError` if `values` are not the sum; they are overwritten."""
        for slice_, numbers in _periods(values, self._sum):
            slice_.sub_(numbers)
        error = float(torch.stack(values.aminmax()).abs().max())  # undefined if a value is
        allowed = self._allowed(case)
        if largest(float(not error <= allowed), self._links.group):
            worst = largest(error if error < float("inf") else sys.float_info.max, self._links.group)
            raise PacelineError(
                f"{case} summed {values.nbytes:,} bytes over {self._links.world_size} workers wrongly: a value is off "
                f"by {worst:.3g} where {allowed:.3g} is allowed; do not train with it here."
            )

    def _allowed(self, case: CommCase) -> float:
        """One rounding a worker at most, of a magnitude that no sum on the way exceeds; nothing where none happens."""
        largest = 2 * self._links.world_size
        wire = WIRE_FACTS[case.wire]
        unit = max(wire.rounding, torch.finfo(self._dtype).eps / 2)
        if largest * unit <= 1:
            return 0.0
        return largest * self._links.world_size * unit


def in_turn(nodes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """An order of ranks in which neighbours are on different nodes, each rank as a node of its own."""
    return tuple((rank,) for turn in zip_longest(*nodes) for rank in turn if rank is not None)


def _in_float(algorithm: Algorithm) -> Algorithm:
    """Sums 16-bit values in float32, rounding once, as `Aggregator` does for gradients."""

    def total(values: Tensor, links: Links) -> None:
        wide = values if values.itemsize >= 4 else values.float()
        algorithm(wide, links)
        if wide is not values:
            values.copy_(wide)

    return total


def _periods(values: Tensor, numbers: Tensor) -> list[tuple[Tensor, Tensor]]:
    """`values` in two slices, each with the numbers that belong there: rows of whole periods, then the rest."""
    whole = len(values) // PERIOD * PERIOD
    return [(values[:whole].view(-1, PERIOD), numbers), (values[whole:], numbers[: len(values) - whole])]


def _counters(interfaces: str) -> tuple[Path, ...]:
    folders = [Path("/sys/class/net") / name / "statistics" for name in interfaces.split(",")]
    for folder in folders:
        if not folder.is_dir():
            name = folder.parent.name
            raise LaunchError(f"There is no network interface {name} on this node; name one that `ip link` lists.")
    return tuple(folder / name for folder in folders for name in ("tx_bytes", "rx_bytes"))


def bench_collectives(request: CommRequest, report: Report = unreported) -> CommTimings | None:
    """Join the other workers and time what is asked for. None on all workers but the first.

    Raises:
        JobError: none of the requested cases can be timed.
    """
    world = join_workers(request.device_kind, request.timeout_s)
    links = open_links(_group(world, request.timeout_s), world.device, request.timeout_s)
    meter = LoadMeter(world.device)
    timings, left_out = time_cases(request, links, report=report)
    if not timings:
        reasons = "; ".join(f"{left.case}: {left.reason}" for left in left_out)
        raise JobError(f"None of the requested timings is possible: {reasons}.")
    load = meter.load(world.group)
    if world.rank != 0:
        return None
    return CommTimings(
        request,
        links.nodes,
        "cuda" if world.device.type == "cuda" else "cpu",
        tuple(timings),
        tuple(fit(timings)),
        tuple(left_out),
        describe_environment(world),
        load,
    )


def _group(world: World, timeout_s: float) -> dist.ProcessGroup:
    if world.group is not None:
        return world.group
    # A worker alone has no group in a run, but algorithms want one.
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
    assert dist.group.WORLD is not None
    return dist.group.WORLD


if __name__ == "__main__":
    run_program(__doc__, CommRequest, bench_collectives, TIMINGS_FILE)
