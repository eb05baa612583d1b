"""Times sums over all workers, one process a worker: `python -m paceline.measure.collective_bench REQUEST.json OUT`.

Started by `paceline bench comm`, torchrun, srun or mpirun alike. REQUEST.json holds a `CommRequest`; {} asks for all
its defaults. Rank 0 writes a `CommTimings` to OUT/timings.json.

As in nccl-tests, every vector holds known numbers and every sum is checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from paceline import env
from paceline.comm import ALGORITHMS, WIRE_FORMATS, Algorithm, Links, open_links
from paceline.comm.timing import fit_cost, slowest, time_sum
from paceline.errors import JobError, LaunchError, PacelineError
from paceline.spec import Plan
from paceline.spec.comm_timing import (
    TIMINGS_FILE,
    CommCase,
    CommFit,
    CommRequest,
    CommTiming,
    CommTimings,
    LeftOut,
    message_sizes,
)
from paceline.train.environment import describe_environment
from paceline.train.process_group import World, join
from paceline.train.progress import Report, bar

PERIOD = 65_537
"""Values after which a vector repeats; a prime, so that no two parts that algorithms cut are alike."""

_EXACT = ("tree_exact",)
_ROUNDS_BETWEEN_NODES = ("hierarchical", "parameter_server_two_level")

_ROUNDING = {"float32": 2.0**-24, "float64": 2.0**-53, "bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 1 / 254}
"""Largest error of one rounding, relative to the value, or for int8 to the largest value of its chunk."""


def time_cases(
    request: CommRequest,
    links: Links,
    algorithms: Mapping[str, Algorithm] = ALGORITHMS,
    report: Report = lambda _doing, _done: None,
) -> tuple[list[CommTiming], list[LeftOut]]:
    """Time every case at every size as far as the budget goes; a common act, with one result for all workers.

    Sizes grow, and within a round all cases take turns, because machines are noisy. What a call will take at the next
    size is forecast from the last one by its bytes; the slowest cases are left out first when not all fit. The
    smallest size is timed in any case.

    Args:
        report: told before every call what it is and which part of all calls is done.

    Raises:
        PacelineError: a wrong sum; names algorithm and size.
    """
    started = time.perf_counter()
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
        left_s = request.budget_s - slowest(time.perf_counter() - started, links)
        forecast_s = {case: seconds * size / last_size for case, seconds in call_s.items()}
        missing = tuple(later for later in sizes[place:] if later in asked)
        if not bench.fits_into_memory(size):
            reason = "the vectors and their copies need more memory than is free"
            left_out += [LeftOut(case, missing, reason) for case in forecast_s]
            break
        while place > 0 and forecast_s and sum(forecast_s.values()) > left_s:
            case = max(forecast_s, key=forecast_s.__getitem__)
            reason = f"about {forecast_s.pop(case):.2g} s a call; the budget is {request.budget_s:g} s for all"
            left_out.append(LeftOut(case, missing, reason))
        if not forecast_s:
            break
        round_s = sum(forecast_s.values())
        growths = [later / size for later in sizes[place + 1 : place + 3]]
        num_rounds = _num_rounds(request.num_rounds, left_s, round_s, growths, len(missing) - 1) if size in asked else 1
        samples: dict[CommCase, list[_Sample]] = {case: [] for case in forecast_s}
        for number in range(num_rounds):
            for turn, case in enumerate(samples):
                done = (place + (number + turn / len(samples)) / num_rounds) / len(sizes)
                report(f"{size:,} bytes, round {number + 1} of {num_rounds}: {case}", done)
                samples[case].append(bench.call(case, size))
            left_s = request.budget_s - slowest(time.perf_counter() - started, links)
            round_s = sum(calls[-1].whole_s for calls in samples.values())
            if left_s < round_s * (1 + sum(growths[:1])):  # one more would cost the next size its only one
                break
        timings += [_timing(case, size, calls) for case, calls in samples.items() if size in asked]
        call_s = {case: min(call.whole_s for call in calls) for case, calls in samples.items()}
        last_size = size
    return timings, left_out


def _with_steps(sizes: Sequence[int]) -> list[int]:
    """`sizes`, and some between those that lie far apart: a forecast goes one step, no further."""
    steps = [sizes[0]]
    for size in sizes[1:]:
        steps += message_sizes(steps[-1], size)[1:]
    return steps


def _pointless(request: CommRequest, links: Links) -> list[LeftOut]:
    """Cases in a wire format in which nothing would travel: their figures would be those of another case."""
    left_out = []
    for case in dict.fromkeys(request.cases):
        if case.wire == "float32":
            continue
        if case.algorithm in _EXACT:
            left_out.append(LeftOut(case, request.sizes_bytes, "whatever the format, it sends values as they are"))
        elif case.algorithm in _ROUNDS_BETWEEN_NODES and len(links.nodes) == 1:
            reason = "inside a node it leaves values as they are, and there is one node"
            left_out.append(LeftOut(case, request.sizes_bytes, reason))
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
    middle = sorted(counts)[len(counts) // 2] if counts else None
    return CommTiming(case, size_bytes, tuple(call.sum_s for call in calls), middle)


def fit(timings: Sequence[CommTiming]) -> list[CommFit]:
    """A line for every case, through the medians of its sizes."""
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
    """With writing and checking the numbers."""
    link_bytes: float | None


class _Bench:
    """A vector of known numbers, and the calls that sum it."""

    def __init__(self, request: CommRequest, links: Links, algorithms: Mapping[str, Algorithm]) -> None:
        self._links = links
        self._algorithms = algorithms
        self._dtype = getattr(torch, request.dtype)
        self._num_servers = min(request.num_servers, links.world_size)
        self._counters = None if request.interface is None else _counters(request.interface)
        self._vector = torch.empty(0, dtype=self._dtype, device=links.device)
        # Small whole numbers: their sums are exact in every format but int8 for up to 128 workers.
        numbers = [
            torch.randint(-2, 3, (PERIOD,), generator=torch.Generator().manual_seed(rank))
            for rank in range(links.world_size)
        ]
        self._mine = numbers[links.rank].to(links.device, self._dtype)
        self._sum = sum(numbers[1:], numbers[0]).to(links.device, self._dtype)

    def call(self, case: CommCase, size_bytes: int) -> _Sample:
        """Write the numbers, sum them, check the sum. Raises `PacelineError` on all workers if it is wrong on any."""
        began = time.perf_counter()
        if self._vector.nbytes < size_bytes:  # kept, because new memory costs as much time as a fast sum
            self._vector = torch.empty(size_bytes // self._dtype.itemsize, dtype=self._dtype, device=self._links.device)
        values = self._vector[: size_bytes // self._dtype.itemsize]
        for part, numbers in _periods(values, self._mine):
            part.copy_(numbers)
        before = self._link_bytes()
        sum_s = time_sum(_in_float(self._algorithms[case.algorithm]), self._links_for(case), values)
        after = self._link_bytes()
        self._check(case, values)
        whole_s = slowest(time.perf_counter() - began, self._links)
        crossed = None
        if before is not None and after is not None:
            crossed = slowest(max(now - then for now, then in zip(after, before, strict=True)), self._links)
        return _Sample(sum_s, whole_s, crossed)

    def fits_into_memory(self, size_bytes: int) -> bool:
        """Whether every node has room: three vectors a worker, and one of each worker where all send to one."""
        num_local = 1 if self._links.device.type == "cuda" else len(self._links.node)
        missing = size_bytes * (3 * num_local + self._links.world_size) - _free_bytes(self._links.device)
        return slowest(missing, self._links) <= 0

    def _links_for(self, case: CommCase) -> Links:
        links = replace(self._links, wire=WIRE_FORMATS[case.wire], num_servers=self._num_servers)
        if case.order == "by_node":
            return links
        return replace(links, nodes=in_turn(links.nodes), shared_memory=None, node_group=None)

    def _link_bytes(self) -> tuple[int, ...] | None:
        return None if self._counters is None else tuple(int(path.read_text()) for path in self._counters)

    def _check(self, case: CommCase, values: Tensor) -> None:
        """Compare with the sum, which is written over."""
        for part, numbers in _periods(values, self._sum):
            part.sub_(numbers)
        error = float(torch.stack(values.aminmax()).abs().max())  # undefined if a value is
        allowed = self._allowed(case)
        if slowest(float(not error <= allowed), self._links):
            worst = slowest(error if error < float("inf") else sys.float_info.max, self._links)
            raise PacelineError(
                f"{case} summed {values.nbytes:,} bytes over {self._links.world_size} workers wrongly: a value is off "
                f"by {worst:.3g} where {allowed:.3g} is allowed; do not train with it here."
            )

    def _allowed(self, case: CommCase) -> float:
        """One rounding a worker at most, of a magnitude that no sum on the way exceeds; nothing where none happens."""
        largest = 2 * self._links.world_size
        dtype = str(self._dtype).removeprefix("torch.")
        unit = max(_ROUNDING[case.wire], _ROUNDING[dtype])
        if case.wire != "int8" and largest * unit <= 1:
            return 0.0
        return largest * self._links.world_size * unit


def in_turn(nodes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """As if every worker were a node of its own, those of different nodes next to each other."""
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
    """`values` in parts, each with the numbers that belong there: rows of whole periods, then the rest."""
    whole = len(values) // PERIOD * PERIOD
    return [(values[:whole].view(-1, PERIOD), numbers), (values[whole:], numbers[: len(values) - whole])]


def _counters(interface: str) -> tuple[Path, Path]:
    folder = Path("/sys/class/net") / interface / "statistics"
    if not folder.is_dir():
        raise LaunchError(f"There is no network interface {interface} on this node; name one that `ip link` lists.")
    return folder / "tx_bytes", folder / "rx_bytes"


def _free_bytes(device: torch.device) -> float:
    """Memory to be had on this node, or on this GPU; endless where the system does not tell."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), float("inf"))


def run(request: CommRequest, out: Path, *, quiet: bool) -> None:
    """Meet the other workers, time what is asked for, and leave the file; rank 0 shows how far it is."""
    facts = env.worker_facts()
    kind = request.device_kind or env.device_kind() or ("cuda" if torch.cuda.is_available() else "cpu")
    plan = Plan(
        world_size=facts.world_size, device_kind="cuda" if kind == "cuda" else "cpu", timeout_s=request.timeout_s
    )
    torch.set_num_threads(env.thread_limit() or max(1, torch.get_num_threads() // facts.local_world_size))
    world = join(facts, plan)
    links = open_links(_group(world, plan), world.device, plan.timeout_s)
    with bar("", is_shown=world.rank == 0 and not quiet, has_percent=True) as report:
        timings, left_out = time_cases(request, links, report=report)
    if not timings:
        reasons = "; ".join(f"{left.case}: {left.reason}" for left in left_out)
        raise JobError(f"Nothing of what was asked for can be timed: {reasons}.")
    if world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        CommTimings(
            request,
            links.nodes,
            plan.device_kind,
            tuple(timings),
            tuple(fit(timings)),
            tuple(left_out),
            describe_environment(world),
        ).save(out / TIMINGS_FILE)


def _group(world: World, plan: Plan) -> dist.ProcessGroup:
    if world.group is not None:
        return world.group
    # A worker alone has no group in a run, but algorithms want one.
    timeout = timedelta(seconds=plan.timeout_s)
    dist.init_process_group(plan.backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.measure.collective_bench", description=__doc__)
    parser.add_argument("request", type=Path, help="JSON file with what to time; {} is everything")
    parser.add_argument("out", type=Path, help="folder for timings.json")
    parser.add_argument("--quiet", action="store_true", help="say nothing")
    arguments = parser.parse_args()
    try:
        plain = json.loads(arguments.request.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise JobError(f"The request {arguments.request} cannot be read: {problem}.") from None
    run(CommRequest.from_mapping(plain), arguments.out, quiet=arguments.quiet)


if __name__ == "__main__":
    main()
