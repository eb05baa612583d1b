"""`paceline probe`: what links, model, loader and disk of these nodes really do, for plans to be made from."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline import env
from paceline.cli.console import table_console
from paceline.cli.options import AsJson, DataDir, Quiet, Settings, Threads
from paceline.errors import ClusterError, PacelineError, WorkerFailed
from paceline.measure.values import (
    JOB_FILE,
    LINKS_FILE,
    NETWORK_FILE,
    REQUEST_FILE,
    JobProbe,
    JobRequest,
    LinkProbe,
    LinkRequest,
    NetworkProbe,
    NetworkRequest,
    read_json,
    write_json,
)
from paceline.measure.which_links import MOST_NODES_IN_FULL, merged_reasons, node_pairs, with_measured
from paceline.plan import place
from paceline.spec import Cluster, Job, JobTiming, Link, NetworkLink, Node, NodePlacement, Plan
from paceline.spec.codec import to_mapping
from paceline.workflows.allocation import ANYWHERE, Allocation, Where, open_allocation, says_where
from paceline.workflows.jobs import resolve_job

if TYPE_CHECKING:
    from rich.table import Table

_PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The order in which the cluster counts GPUs; CUDA's own puts the fastest first."""


@says_where
def probe(
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="A job file or recipe whose model and data are timed too.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", min=1, help="Workers that will share a batch; all devices.")
    ] = None,
    out: Annotated[Path, typer.Option(help="What was measured goes here, into what there is.")] = Path("cluster.json"),
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where runs, and so checkpoints, are written.")] = Path(
        "runs"
    ),
    budget: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="For the job's timings.")] = 60.0,
    data: DataDir = None,
    settings: Settings = None,
    threads: Threads = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    where: Where = ANYWHERE,
) -> None:
    """Measure links inside and between nodes, and a job's model, loader and checkpoints; write cluster.json."""
    resolved = None if job is None else resolve_job(job, settings, data)
    before = Cluster.load(out) if out.exists() else None
    timing = None
    with _scratch(folder) as scratch, open_allocation(where, scratch) as site:
        plan = None if resolved is None else _plan(resolved, site.cluster, workers, threads)
        nodes, reasons = _measure_links(site, scratch, quiet=quiet)
        network, more = _measure_network(site, scratch, quiet=quiet)
        reasons += more
        if resolved is not None and plan is not None:
            timing, more = _measure_job(resolved, plan, site, scratch, budget, quiet=quiet)
            reasons += more
    measured = Cluster(nodes, network, () if timing is None else (timing,))
    try:
        merge(before, measured).save(out)
    except OSError as problem:
        raise ClusterError(f"{out} cannot be written: {problem}.") from None
    _show(measured, reasons, out, as_json=as_json)


def merge(before: Cluster | None, measured: Cluster) -> Cluster:
    """What was known, with nodes, network and timings that were measured in place of what was known of them.

    How right forecasts were stays known.
    """
    if before is None:
        return measured
    nodes = {node.hostname: node for node in (*before.nodes, *measured.nodes)}
    network = {frozenset(link.ends): link for link in (*before.network, *measured.network)}
    timings = {
        (timing.job, timing.device, timing.threads_per_worker): timing
        for timing in (*before.timings, *measured.timings)
    }
    return Cluster(tuple(nodes.values()), tuple(network.values()), tuple(timings.values()), before.checks)


def _plan(job: Job, cluster: Cluster, num_workers: int | None, threads: int | None) -> Plan:
    most = min(len(cluster.devices), job.virtual_shards)
    return place(job, cluster, num_workers or most, threads_per_worker=threads)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder of our own on the disk that checkpoints go to; it stays if a worker fails, whose report lies there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="probe-", dir=folder)).absolute()
    except OSError as problem:
        raise PacelineError(f"The folder {folder} cannot be used: {problem}; name another with --folder.") from None
    try:
        yield scratch
    except WorkerFailed:
        raise
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def _measure_links(site: Allocation, scratch: Path, *, quiet: bool) -> tuple[tuple[Node, ...], list[str]]:
    """The nodes with what two devices of each send each other, and what could not be measured."""
    from rich.console import Console

    nodes = site.cluster.nodes
    with Console(stderr=True, quiet=quiet).status("links inside " + _count(len(nodes), "node")):
        _run_probe("link_probe", LinkRequest(nodes), _one_worker_a_node(site.cluster), site, scratch, quiet=True)
    results = [read_json(LinkProbe, scratch / LINKS_FILE.format(rank=rank)) for rank in range(len(nodes))]
    measured = tuple(with_measured(node, result.links) for node, result in zip(nodes, results, strict=True))
    reasons = {node.hostname: result.not_measured for node, result in zip(nodes, results, strict=True)}
    return measured, merged_reasons(reasons)


def _measure_network(site: Allocation, scratch: Path, *, quiet: bool) -> tuple[tuple[NetworkLink, ...], list[str]]:
    """What pairs of nodes reach, and which pairs were left out."""
    cluster = site.cluster
    num_nodes = len(cluster.nodes)
    if num_nodes == 1:
        return (), []
    pairs = node_pairs(num_nodes)
    request = NetworkRequest(tuple(node.hostname for node in cluster.nodes), tuple(pairs), cluster.device_kind)
    _run_probe("network_probe", request, _one_worker_a_node(cluster), site, scratch, quiet=quiet)
    left_out = num_nodes * (num_nodes - 1) // 2 - len(pairs)
    reason = (
        f"{_count(left_out, 'pair')} of nodes: beyond {MOST_NODES_IN_FULL} nodes, neighbours in their order and some "
        "that stand far apart in it are timed"
    )
    return read_json(NetworkProbe, scratch / NETWORK_FILE).links, [reason] if left_out else []


def _run_probe(
    program: str,
    request: LinkRequest | NetworkRequest | JobRequest,
    plan: Plan,
    site: Allocation,
    scratch: Path,
    *,
    quiet: bool,
) -> None:
    """The workers of `plan` run a program of `paceline.measure`; they leave their results in `scratch`."""
    path = scratch / REQUEST_FILE
    write_json(request, path)
    argv = ["-m", f"paceline.measure.{program}", str(path), str(scratch), *(["--quiet"] if quiet else [])]
    site.run(plan, argv, run_dir=scratch, environ=_PCI_ORDER | ({} if quiet else env.terminal()))


def _one_worker_a_node(cluster: Cluster) -> Plan:
    shares = tuple(NodePlacement(_reached_as(node)) for node in cluster.nodes)
    return Plan(world_size=len(shares), device_kind=cluster.device_kind, nodes=shares)


def _reached_as(node: Node) -> str:
    return node.hostname if node.is_remote else ""


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _measure_job(
    job: Job, plan: Plan, site: Allocation, scratch: Path, budget_s: float, *, quiet: bool
) -> tuple[JobTiming, list[str]]:
    """What the parts of `job` take on the first device of the plan, by itself and beside the plan's other workers."""
    from paceline.plan.forecast import largest_share  # NumPy: not for those who only want help

    share, shard, _ = largest_share(job, plan.world_size)
    whole = job.global_batch_size
    if job.parity == "bitwise":  # a pass for each virtual shard
        share = whole = shard
    workers_on_node = max(node_share.num_workers for node_share in plan.placements)
    if site.where.launcher == "debug":
        plan = _first_alone(plan)
    node = site.cluster.nodes[0]
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
    _run_probe("job_probe", request, plan, site, scratch, quiet=quiet)
    result = read_json(JobProbe, scratch / JOB_FILE)
    return result.timing, list(result.not_measured)


def _first_alone(plan: Plan) -> Plan:
    """The plan with its first worker only."""
    if not plan.nodes:
        return replace(plan, world_size=1)
    first = plan.nodes[0]
    alone = replace(first, num_workers=1, devices=first.devices[:1], cpus=first.cpus[:1])
    return replace(plan, world_size=1, nodes=(alone,))


def _show(measured: Cluster, reasons: Sequence[str], out: Path, *, as_json: bool) -> None:
    """Tables, and what was not measured; or one line of JSON."""
    timing = measured.timings[0] if measured.timings else None
    links = [(node.hostname, link) for node in measured.nodes for link in node.links if link.source == "measured"]
    if as_json:
        shown = {
            "links": [{"node": hostname, **to_mapping(link)} for hostname, link in links],
            "network": [to_mapping(link) for link in measured.network],
            "timing": None if timing is None else to_mapping(timing),
            "not_measured": list(reasons),
            "cluster": str(out),
        }
        print(json.dumps(shown))
        return

    console = table_console(pipe_columns=100)
    if links:
        console.print(_link_table(links, has_several_nodes=len(measured.nodes) > 1))
    if measured.network:
        console.print(_network_table(measured.network))
    if timing is not None:
        console.print(_timing_table(timing))
        where = f" of {measured.nodes[0].hostname}" if len(measured.nodes) > 1 else ""
        print(f"{timing.job}: {timing.num_parameters:,} parameters on {timing.device}{where}")
        if timing.largest_micro_batch_size is not None:
            print(f"largest micro-batch that was tried and fits: {timing.largest_micro_batch_size}")
        if timing.workers_together > 1:
            print(
                f"{timing.workers_together} workers at the same time, {timing.workers_together_on_node} on a node: "
                f"a step takes {timing.together_slowdown:.2f} times as long"
            )
        for timed in timing.sums:
            print(f"summing gradients by {timed.algorithm} in {timed.wire}: {timed.waiting_s * 1e3:.1f} ms more")
        if timing.loader_samples_per_s is not None:
            print(f"loader: {timing.loader_samples_per_s:,.0f} samples/s")
        if timing.checkpoint_bytes_per_s is not None:
            print(f"checkpoints: {timing.checkpoint_bytes_per_s / 1e6:,.0f} MB/s")
    for reason in reasons:
        print(f"not measured: {reason}")
    print(out)


def _link_table(links: Sequence[tuple[str, Link]], *, has_several_nodes: bool) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("link", "between", *(["on"] if has_several_nodes else [])):
        table.add_column(name)
    for name in ("GB/s", "latency µs"):
        table.add_column(name, justify="right")
    first: dict[tuple[str, str], Link] = {}  # a label is measured once a node, on its first pair
    for hostname, link in links:
        first.setdefault((hostname, link.label), link)
    for (hostname, label), link in first.items():
        rate = "" if link.bytes_per_s is None else f"{link.bytes_per_s / 1e9:.2f}"
        latency = "" if link.latency_s is None else f"{link.latency_s * 1e6:.1f}"
        node = [hostname] if has_several_nodes else []
        table.add_row(label, " and ".join(link.ends), *node, rate, latency)
    return table


def _network_table(links: Sequence[NetworkLink]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("network", "between"):
        table.add_column(name)
    for name in ("GB/s", "GB/s by one stream", "latency µs"):
        table.add_column(name, justify="right")
    for link in links:
        single = link.single_stream_bytes_per_s
        alone = "" if single is None else f"{single / 1e9:.3g}"
        table.add_row(
            link.interface,
            " and ".join(link.ends),
            f"{link.bytes_per_s / 1e9:.3g}",
            alone,
            f"{link.latency_s * 1e6:.1f}",
        )
    return table


def _timing_table(timing: JobTiming) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    has_memory = any(row.peak_memory_bytes is not None for row in timing.micro_batches)
    for name in ("micro-batch", "ms a pass", "samples/s", *(["peak GiB"] if has_memory else [])):
        table.add_column(name, justify="right")
    for row in timing.micro_batches:
        memory = [] if row.peak_memory_bytes is None else [f"{row.peak_memory_bytes / 2**30:.2f}"]
        rate = row.micro_batch_size / row.seconds
        table.add_row(str(row.micro_batch_size), f"{row.seconds * 1e3:.2f}", f"{rate:,.0f}", *memory)
    return table
