"""`paceline.probe`: measures links, model, loader and disk of these nodes, from which plans are made."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import ClusterError, WorkerFailed, file_problems
from paceline.measure.values import (
    JOB_FILE,
    LINKS_FILE,
    NETWORK_FILE,
    JobProbe,
    JobRequest,
    LinkProbe,
    LinkRequest,
    NetworkProbe,
    NetworkRequest,
)
from paceline.measure.which_links import MOST_NODES_IN_FULL, merged_reasons, node_pairs, with_measured
from paceline.plan import place
from paceline.regular_files import make_run_folder
from paceline.spec import Cluster, Job, JobTiming, NetworkLink, Node, NodePlacement, Plan
from paceline.words import number_of
from paceline.workflows.allocation import Allocation, open_allocation
from paceline.workflows.arguments import checked
from paceline.workflows.forecasts import CLUSTER_FILE
from paceline.workflows.jobs import check_amounts, check_counts, resolve_job
from paceline.workflows.where import HERE, Where

_PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The order in which the cluster counts GPUs; CUDA's own puts the fastest first."""

_REPEAT_SHARE = 0.75
"""A disturbed measurement is repeated where it has left this share of the budget."""


@dataclass(frozen=True)
class ProbeResult:
    """The new measurements, and a sentence for each one that was left out."""

    measured: Cluster
    not_measured: tuple[str, ...]

    @property
    def timing(self) -> JobTiming | None:
        """The timing of the job; None if no job was named."""
        return self.measured.timings[0] if self.measured.timings else None


@checked
def probe(
    job: Job | str | Path | None = None,
    *,
    workers: int | None = None,
    out: Path | str = CLUSTER_FILE,
    folder: Path | str = Path("runs"),
    budget: float = 60.0,
    model: str | Callable[..., Any] | None = None,
    data: str | Path | Callable[..., Any] | None = None,
    settings: Sequence[str] = (),
    threads: int | None = None,
    quiet: bool = True,
    where: Where = HERE,
) -> ProbeResult:
    """Measure links inside and between nodes, and a job's model, loader and checkpoints; write it into a file.

    Example: `paceline.probe("digits-lenet", budget=10)`.

    Args:
        job: a job, a job file or a recipe whose model and data are timed too; None: only links.
        workers: number of workers that will share a global batch; None: all devices.
        out: the file to write; earlier measurements that are not repeated stay in it.
        folder: where runs and their checkpoints are written; its storage is measured.
        budget: seconds to spend on timing the job.
        threads: CPU threads that each worker computes with; None: an equal share of the cores.
        quiet: whether progress is left out, which goes to standard error.
        where: the nodes, and how they are reached.
        model, data, settings: as for `train`.

    Raises:
        ClusterError: the file cannot be read or written.
        PacelineError: an invalid argument, nodes that cannot be reached, a mistake in the job (see `errors`).
        WorkerFailed: a worker failed.
    """
    check_counts(workers=workers, threads=threads)
    check_amounts(budget=budget)
    resolved = None if job is None else resolve_job(job, settings, data, model)
    file = Path(out)
    before = Cluster.load(file) if file.exists() else None
    with file_problems(f"{out} cannot be written", ClusterError), tempfile.TemporaryFile(dir=file.parent):
        pass  # known before minutes are spent on what could not be kept
    timings: tuple[JobTiming, ...] = ()
    with _scratch(Path(folder)) as scratch, open_allocation(where, scratch) as allocation:
        plan = None
        if resolved is not None:
            most = min(len(allocation.cluster.devices), resolved.virtual_shards)
            plan = place(resolved, allocation.cluster, workers or most, threads_per_worker=threads)
        nodes, reasons = _measure_links(allocation, scratch, quiet=quiet)
        network, more = _measure_network(allocation, scratch, quiet=quiet)
        reasons += more
        if resolved is not None and plan is not None:
            timing, more = _least_disturbed(resolved, plan, allocation, scratch, budget, quiet=quiet)
            timings, reasons = (timing,), reasons + more
    measured = Cluster(nodes, network, timings)
    with file_problems(f"{out} cannot be written", ClusterError):
        merge(before, measured).save(file)
    return ProbeResult(measured, tuple(reasons))


def merge(before: Cluster | None, measured: Cluster) -> Cluster:
    """`before` with the nodes, links and timings of `measured` in place of its own; its forecast checks stay."""
    if before is None:
        return measured
    nodes = {node.hostname: node for node in (*before.nodes, *measured.nodes)}
    network = {frozenset(link.ends): link for link in (*before.network, *measured.network)}
    timings = {
        (timing.job, timing.device, timing.threads_per_worker): timing
        for timing in (*before.timings, *measured.timings)
    }
    return Cluster(tuple(nodes.values()), tuple(network.values()), tuple(timings.values()), before.checks)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A temporary folder on the disk that checkpoints go to; it stays if a worker fails, whose report lies there."""
    with file_problems(f"The folder {folder} cannot be used"):
        make_run_folder(folder)
        scratch = Path(tempfile.mkdtemp(prefix="probe-", dir=folder)).absolute()
    with ExitStack() as at_end:
        at_end.callback(shutil.rmtree, scratch, ignore_errors=True)
        try:
            yield scratch
        except WorkerFailed:
            at_end.pop_all()
            raise


def _measure_links(allocation: Allocation, scratch: Path, *, quiet: bool) -> tuple[tuple[Node, ...], list[str]]:
    """The nodes with measured links between their devices, and what could not be measured."""
    from rich.console import Console

    nodes = allocation.cluster.nodes
    with Console(stderr=True, quiet=quiet).status("links inside " + number_of(len(nodes), "node")):
        plan = _one_worker_a_node(allocation.cluster)
        allocation.measure("link_probe", LinkRequest(nodes), plan, scratch, quiet=True, **_PCI_ORDER)
    results = [LinkProbe.load(scratch / LINKS_FILE.format(rank=rank)) for rank in range(len(nodes))]
    measured = tuple(with_measured(node, result.links) for node, result in zip(nodes, results, strict=True))
    reasons = {node.hostname: result.not_measured for node, result in zip(nodes, results, strict=True)}
    return measured, merged_reasons(reasons)


def _measure_network(
    allocation: Allocation, scratch: Path, *, quiet: bool
) -> tuple[tuple[NetworkLink, ...], list[str]]:
    """The bandwidth and latency between pairs of nodes, and which pairs were left out."""
    cluster = allocation.cluster
    num_nodes = len(cluster.nodes)
    if num_nodes == 1:
        return (), []
    pairs = node_pairs(num_nodes)
    request = NetworkRequest(tuple(node.hostname for node in cluster.nodes), tuple(pairs), cluster.device_kind)
    allocation.measure("network_probe", request, _one_worker_a_node(cluster), scratch, quiet=quiet, **_PCI_ORDER)
    left_out = num_nodes * (num_nodes - 1) // 2 - len(pairs)
    reason = (
        f"{number_of(left_out, 'pair')} of nodes: beyond {MOST_NODES_IN_FULL} nodes, neighbours in their order and "
        "some that stand far apart in it are timed"
    )
    return NetworkProbe.load(scratch / NETWORK_FILE).links, [reason] if left_out else []


def _one_worker_a_node(cluster: Cluster) -> Plan:
    placements = tuple(NodePlacement(node.hostname if node.is_remote else "") for node in cluster.nodes)
    return Plan(world_size=len(placements), device_kind=cluster.device_kind, nodes=placements)


def _least_disturbed(
    job: Job, plan: Plan, allocation: Allocation, scratch: Path, budget_s: float, *, quiet: bool
) -> tuple[JobTiming, list[str]]:
    """`measure_job`; where others disturbed it, once more in what is left of the budget, and the better of the two."""
    began = time.monotonic()
    timing, reasons = measure_job(job, plan, allocation, scratch, budget_s, quiet=quiet)
    left_s = budget_s - (time.monotonic() - began)
    if timing.load is not None and timing.load.is_disturbing and left_s > _REPEAT_SHARE * budget_s:
        folder = scratch / "again"
        folder.mkdir()
        again, more = measure_job(job, plan, allocation, folder, left_s, quiet=quiet)
        if again.load is not None and again.load.disturbance < timing.load.disturbance:
            timing, reasons = again, more
    if timing.load is not None and timing.load.is_disturbing:
        reasons = [*reasons, f"the job on an idle machine: {timing.load.sentence()}"]
    return timing, reasons


def measure_job(
    job: Job, plan: Plan, allocation: Allocation, scratch: Path, budget_s: float, *, quiet: bool
) -> tuple[JobTiming, list[str]]:
    """The times of the job's parts on the plan's first device, alone and beside the other workers; what is missing."""
    from paceline.plan.inputs import largest_assignment  # NumPy: not for those who only want help

    share, shard, _ = largest_assignment(job, plan.world_size)
    whole = job.global_batch_size
    if job.parity == "bitwise":  # a pass for each virtual shard
        share = whole = shard
    workers_on_node = max(placement.num_workers for placement in plan.placements)
    if allocation.where.launcher == "debug":
        plan = _first_alone(plan)
    node = allocation.cluster.nodes[0]
    device = node.devices[0]
    request = JobRequest(
        job,
        str(scratch),
        largest_micro_batch_size=whole,
        micro_batch_size=share,
        shard_size=shard,
        workers_on_node=workers_on_node,
        device_kind=plan.device_kind,
        device=device.name if device.kind == plan.device_kind else node.cpu_name,
        threads_per_worker=plan.threads_per_worker,
        budget_s=budget_s,
    )
    allocation.measure("job_probe", request, plan, scratch, quiet=quiet, **_PCI_ORDER)
    result = JobProbe.load(scratch / JOB_FILE)
    return result.timing, list(result.not_measured)


def _first_alone(plan: Plan) -> Plan:
    """The plan with its first worker only."""
    if not plan.nodes:
        return replace(plan, world_size=1)
    first = plan.nodes[0]
    alone = replace(first, num_workers=1, devices=first.devices[:1], cpus=first.cpus[:1])
    return replace(plan, world_size=1, nodes=(alone,))
