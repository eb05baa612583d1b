"""`paceline.bench`: side-by-side measurements on this hardware, of collectives and of checkpoints."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import JobError, PacelineError
from paceline.plan import spread
from paceline.spec import AlgorithmName, Cluster, Plan
from paceline.spec.algorithm import SERVER_ALGORITHMS, algorithm_names
from paceline.spec.checkpoint_timing import CheckpointRequest, CheckpointTimings
from paceline.spec.comm_timing import (
    TIMINGS_FILE,
    CommCase,
    CommRequest,
    CommTimings,
    message_sizes,
)
from paceline.spec.record import RECORD_FILE
from paceline.spec.wire import WireName
from paceline.workflows.allocation import open_allocation
from paceline.workflows.arguments import checked
from paceline.workflows.jobs import check_amounts, check_counts, check_words
from paceline.workflows.run_folder import new_run_dir
from paceline.workflows.where import HERE, Where

__all__ = ["checkpoint", "comm"]


@checked
def comm(
    *,
    workers: int | None = None,
    algorithms: Sequence[AlgorithmName] | None = None,
    wires: Sequence[WireName] = ("float32",),
    dtype: str = "float32",
    min_bytes: int = 4 << 10,
    max_bytes: int = 256 << 20,
    servers: int = 1,
    link_rate: float | None = None,
    rounds: int = 20,
    budget: float = 60.0,
    out: Path | str | None = None,
    draw: Path | str | None = None,
    quiet: bool = True,
    where: Where = HERE,
) -> CommTimings:
    """Time every way to sum over all workers, by message size; the page is written to the folder of the results.

    Example: `paceline.bench.comm(workers=2, algorithms=["all_reduce", "ring"], max_bytes=1 << 20)`.

    Args:
        workers: number of workers; None: one for each device, and two at least without a GPU.
        algorithms: the all-reduce algorithms to time; None: all of them.
        wires: the wire formats, in which values are sent: float32, bfloat16, float16.
        dtype: data type of the values that are summed: "float32", "bfloat16", …
        min_bytes: the smallest message in bytes (on a command line also as 64KiB); sizes grow from it by a factor of 4.
        max_bytes: the largest message in bytes (on a command line also as 16MiB or 100MB).
        servers: number of workers that are also parameter servers.
        link_rate: bytes per second of one link in one direction, such as 25e9, to compare with.
        rounds: maximum rounds per size; long calls get fewer.
        budget: seconds for all timings; what does not fit is left out.
        out: the folder of the results; None: a new one under runs/.
        draw: measure nothing; write the page of this timings.json again.
        quiet: whether workers leave out their progress, which goes to standard error.
        where: the nodes, and how they are reached.

    Raises:
        JobError: an invalid argument.
        PacelineError: the folder holds a benchmark, or cannot be used.
        WorkerFailed: a worker failed.
    """
    from paceline.report.comm_page import load_timings, write_comm_bench  # a template engine and a plotting library

    if draw is not None:
        drawn = Path(draw)
        folder = Path(out) if out else (drawn if drawn.is_dir() else drawn.parent)
        timings = load_timings(drawn)
    else:
        check_counts(workers=workers)
        check_words(algorithms=algorithms or (), wires=wires)
        if servers != 1 and algorithms and not set(algorithms) & set(SERVER_ALGORITHMS):
            raise JobError(
                f"servers = {servers} goes with the algorithms {' and '.join(SERVER_ALGORITHMS)}; leave it out."
            )
        request = CommRequest.from_mapping(
            {
                "cases": [CommCase(name, wire) for wire in wires for name in algorithms or algorithm_names()],
                "sizes_bytes": message_sizes(min_bytes, max_bytes),
                "dtype": dtype,
                "num_servers": servers,
                "num_rounds": rounds,
                "budget_s": budget,
                "link_rate_bytes_per_s": link_rate,
            }
        )
        folder = results_folder(out, "bench-comm")
        with open_allocation(where, folder) as allocation:
            plan = bench_plan(allocation.cluster, workers)
            # Bytes are counted on an interface that every node has under one name; only the user can say that.
            counted = where.interface if len(plan.placements) > 1 else None
            request = dataclasses.replace(request, device_kind=plan.device_kind, interface=counted)
            allocation.measure("collective_bench", request, plan, folder, quiet=quiet)
        timings = load_timings(folder)
    write_comm_bench(timings, folder)
    return timings


@checked
def checkpoint(
    *,
    directory: str | None = None,
    workers: int | None = None,
    parameters: float = 100e6,
    rounds: int = 5,
    out: Path | str | None = None,
    quiet: bool = True,
    where: Where = HERE,
) -> CheckpointTimings:
    """Time checkpoints on a storage: how long training stalls, and how long until one is complete.

    Example: `paceline.bench.checkpoint(parameters=1e6, rounds=1)`.

    Args:
        directory: where to save: a folder, or an address such as s3://bucket/place; None: the results' folder.
        workers: number of workers; None: one for each device, and two at least without a GPU.
        parameters: number of parameters of the model; a checkpoint has 12 bytes for each.
        rounds: number of checkpoints after the first.
        out: the folder of the results; None: a new one under runs/.
        quiet, where: as for `comm`.

    Raises:
        PacelineError: the folder holds a benchmark, or cannot be used; or the storage fails.
        WorkerFailed: a worker failed.
    """
    check_counts(workers=workers)
    check_amounts(parameters=parameters)
    folder = results_folder(out, "bench-checkpoint")
    # A unique name, so that existing files are not touched.
    place = directory or str(folder.absolute())
    address = f"{place if '://' in place else Path(place).absolute()}/bench-{uuid.uuid4().hex[:8]}"
    request = CheckpointRequest.from_mapping(
        {"address": address, "num_parameters": int(parameters), "num_rounds": rounds}
    )
    with open_allocation(where, folder) as allocation:
        plan = bench_plan(allocation.cluster, workers)
        request = dataclasses.replace(request, device_kind=plan.device_kind)
        allocation.measure("checkpoint_bench", request, plan, folder, quiet=quiet)
    return CheckpointTimings.load(folder / TIMINGS_FILE)


def results_folder(out: Path | str | None, name: str) -> Path:
    """The folder of a new benchmark: `out` or a fresh one. Raises `PacelineError` where it already holds results."""
    folder = new_run_dir(out, name)
    for file, what in ((RECORD_FILE, "finished run"), (TIMINGS_FILE, "benchmark")):
        if (folder / file).exists():
            raise PacelineError(f"{folder} already holds a {what}; name another folder, or remove this one.")
    return folder


def bench_plan(cluster: Cluster, workers: int | None) -> Plan:
    """One worker for each device; on CPU at least two, since a sum needs two."""
    return spread(cluster, workers or max(len(cluster.devices), 2 if cluster.device_kind == "cpu" else 1))
